"""The command line. Each command imports what it needs when it runs, so that help and settings come up at once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from burnish.config.load import SettingsError, dump, load_recipe, resumable_changes, shipped

if TYPE_CHECKING:
    from burnish.api import Trainer
    from burnish.config import Settings

app = typer.Typer(
    name="burnish", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Reinforcement-learning post-training of language models, on one machine.\n\n"
    "\b\nStart with:\n  burnish recipes\n  burnish train from-scratch-tiny",
)


RecipeArg = Annotated[str, typer.Argument(metavar="RECIPE", show_default=False, help="A shipped recipe by name, or a YAML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="Change a setting, as train.steps=100. May be given many times."),
]
SeedOption = Annotated[int | None, typer.Option(show_default=False, help="Short for --set seed=N.")]


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from burnish import __version__

        print(f"burnish {__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", show_default=False, help="A shipped recipe by name, or a YAML file; not with --resume."),
    ] = None,
    sets: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default=False, help="The run's folder. Without it runs/NAME, runs/NAME-2, ...")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default=False, help="Go on with the run in this folder, with its settings.")
    ] = None,
    print_settings: Annotated[bool, typer.Option("--print-settings", help="Print the effective settings as YAML and stop.")] = False,
    seed: SeedOption = None,
) -> None:
    """Train a model by a recipe.

    \b
    Examples:
      burnish train from-scratch-tiny
      burnish train arithmetic-grpo --seed 1 --out runs/mine
      burnish train my-recipe.yaml --set model.path=./my-model --set train.steps=200
      burnish train my-recipe.yaml --set algo.loss=my_ideas:soft_gate --set algo.loss.temperature=1.0
      burnish train --resume runs/mine --set train.steps=400
      burnish train arithmetic-grpo --print-settings > my-recipe.yaml
    """
    with _told():
        settings = _settings(recipe, _with_seed(sets, seed), resume)
        if print_settings:
            sys.stdout.write(dump(settings))
            return
        if resume and out:
            raise SettingsError([f"--out {out} and --resume {resume} do not go together: a resumed run stays in its folder"])
        folder = None if resume else _free_folder(out, settings.name)
        if resume:
            _not_beyond(resume, settings)
        from burnish.api import Trainer

        _run(Trainer(settings, out=folder, resume=resume))


@app.command()
def check(recipe: RecipeArg, sets: SetOption = None, seed: SeedOption = None) -> None:
    """Say whether a run would work; loads no weights.

    \b
    Examples:
      burnish check my-recipe.yaml
      burnish check arithmetic-grpo --set model.path=./my-model --set sampling.max_new_tokens=2000
    """
    with _told():
        settings = load_recipe(recipe, sets=_with_seed(sets, seed))
        from burnish.plan.preflight import examine

        found = examine(settings)
        for line in found.facts:
            print(line)
        for note in found.notes:
            print(f"note: {note}")
        print("nothing speaks against this run")


@app.command()
def recipes(
    word: Annotated[str | None, typer.Argument(metavar="WORD", show_default=False, help="Only those that have it, in full.")] = None,
) -> None:
    """List the shipped recipes and what they reach; the tiny ones of the presets by name.

    \b
    Examples:
      burnish recipes
      burnish recipes dpo
      burnish train from-scratch-tiny
      burnish train from-scratch-tiny --print-settings
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    with _told():
        console = Console(highlight=False)
        found = [info for info in shipped() if word is None or word.lower() in f"{info.name} {info.about}".lower()]
        tiny = [info.name for info in found if word is None and info.preset and info.name.endswith("-tiny")]
        for info in found:
            if info.name in tiny:
                continue
            console.print(Text(info.name, style="bold"))
            for label, text in (("", info.about), ("expect: ", info.expect)):
                if text:
                    console.print(Padding(Text(label + " ".join(text.split())), (0, 0, 0, 2), expand=False))
        if tiny:
            console.print("and one for each preset, which learns on a CPU in under a minute (`burnish recipes WORD` tells more of them):")
            console.print(Padding(Text(", ".join(tiny)), (0, 0, 0, 2), expand=False))
        if not found:
            raise SettingsError([f"no recipe has the word {word!r}; `burnish recipes` lists all"])


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", show_default=False, help="Print the settings that it stands for.")] = None,
) -> None:
    """List the methods that `preset: NAME` in a recipe stands for, with their sources.

    \b
    Examples:
      burnish presets
      burnish presets dapo
      burnish train from-scratch-tiny --set preset=rloo
    """
    from burnish.config.dump import dump_values
    from burnish.config.presets import PRESETS, preset_of

    with _told():
        if name is None:
            width = max(map(len, PRESETS)) + 2
            for known, preset in PRESETS.items():
                print(f"{known:<{width}}{preset.about} [{preset.source}]")
            return
        try:
            preset = preset_of(name)
        except ValueError as error:
            raise SettingsError([str(error)]) from None
        print(f"# {preset.about}\n# Source: {preset.source}")
        if preset.needs:
            print(f"# Your recipe also gives: {', '.join(preset.needs)}")
        sys.stdout.write(f"preset: {name}    # the same as what follows\n{dump_values(preset.values)}")


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="The folder of a run, finished or not.")],
) -> None:
    """Write report.html of a run anew.

    \b
    Examples:
      burnish report runs/arithmetic-grpo
    """
    with _told():
        if not (run_dir / "metrics.jsonl").is_file():
            raise SettingsError([f"{run_dir} holds no run (no metrics.jsonl in it); give the folder that `burnish train` wrote"])
        from burnish.monitor.report import write_report

        print(write_report(run_dir))


@app.command()
def doctor() -> None:
    """Show versions, device, threads, memory, folders.

    \b
    Examples:
      burnish doctor
    """
    from burnish.plan.machine import describe

    missing = False
    for name, value, fine in describe():
        print(f"{name:<16}{value}")
        missing = missing or not fine
    if missing:
        raise typer.Exit(1)


def _settings(recipe: str | None, sets: list[str], resume: Path | None) -> Settings:
    if resume is None:
        if recipe is None:
            raise SettingsError(["which recipe? Give a name that `burnish recipes` lists, or a YAML file; or --resume DIR"])
        return load_recipe(recipe, sets=sets)
    saved = resume / "settings.yaml"
    if not saved.is_file():
        held = "no such folder" if not resume.is_dir() else "no settings.yaml in it"
        raise SettingsError([f"--resume {resume}: this is no folder of a run ({held})"])
    if recipe is not None:
        print(f"note: {recipe} is not read, because --resume takes the settings of the run in {resume}", file=sys.stderr)
    old = load_recipe(saved)
    new = load_recipe(saved, sets=sets)
    for line in resumable_changes(old, new):
        print(f"changed: {line}", file=sys.stderr)
    return new


def _not_beyond(resume: Path, settings: Settings) -> None:
    from burnish import checkpoint

    last = checkpoint.newest(resume / "checkpoints")
    if last is not None and last.step > settings.train.steps:
        raise SettingsError([
            f"train.steps is {settings.train.steps}, but the run in {resume} has already made {last.step} steps; "
            f"give more, as --set train.steps={2 * last.step}"
        ])


def _with_seed(sets: list[str] | None, seed: int | None) -> list[str]:
    return [*(sets or []), *([] if seed is None else [f"seed={seed}"])]


def _free_folder(out: Path | None, name: str) -> Path:
    """The folder for a new run: the one asked for if it holds no run, else the first free one under runs/."""
    from burnish.checkpoint.claim import holds_run

    if out is None:
        candidates = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 10**6))
        return next(folder for folder in candidates if not folder.exists())
    if out.exists() and not out.is_dir():
        raise SettingsError([f"--out {out}: this is a file; give a folder, which may be new"])
    if holds_run(out):
        raise SettingsError([
            f"--out {out}: this folder already holds a run; go on with it by `burnish train --resume {out}`, or give another folder"
        ])
    return out


def _run(trainer: Trainer) -> None:
    from burnish.monitor.outcome import show_outcome

    try:
        finished = trainer.run()
    except KeyboardInterrupt:
        print(f"\nstopped. {_way_on(trainer.folder)}", file=sys.stderr)
        raise typer.Exit(130) from None
    show_outcome(finished.summary, finished.folder)


def _way_on(folder: Path) -> str:
    from burnish import checkpoint

    if not (folder / "settings.yaml").is_file():
        return "Nothing was written yet."
    last = checkpoint.newest(folder / "checkpoints")
    if last is None:
        return f"No checkpoint was written yet, so `burnish train --resume {folder}` starts from the beginning."
    return f"The last checkpoint is {last.folder}. Go on with: burnish train --resume {folder}"


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors that the package raises to teach are printed as they are; a traceback would hide them. All others keep it."""
    try:
        yield
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Exception as error:
        if not any(kind.__module__.startswith("burnish.") for kind in type(error).__mro__):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
