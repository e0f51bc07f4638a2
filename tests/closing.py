"""Fixtures of the tests of engines; a file names them by pytest_plugins."""

import pytest


@pytest.fixture
def open_():
    """Closes at the end what it is given."""
    things = []

    def keep(thing):
        things.append(thing)
        return thing

    yield keep
    for thing in reversed(things):
        thing.close()


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return tiny_llama.tokenizer
