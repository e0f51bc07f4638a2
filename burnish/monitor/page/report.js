"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Text only ever enters the page as text: no innerHTML anywhere.
function el(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const number = v => v === null || v === undefined ? "-" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") :
  v !== 0 && Math.abs(v) < 0.001 ? v.toExponential(2) : String(+v.toPrecision(4));
const percent = v => (100 * v).toFixed(1) + " %";

// ---- curves ------------------------------------------------------------------------------------
const has = name => (data.series[name] || []).some(v => v !== null);
const same = (a, b) => has(a) && has(b) && data.series[a].every((v, i) => v === data.series[b][i]);
const all = Object.keys(data.series);
const some = (name, test) => (data.series[name] || []).some(v => v !== null && test(v));
const moves = name => new Set((data.series[name] || []).filter(v => v !== null)).size > 1;
const scores = all.filter(name => name.startsWith("rollout/score_"));
const places = all.filter(name => /^rollout\/reward_.+_mean$/.test(name));
const terms = all.filter(name => name.startsWith("train/loss_"));
const coefs = all.filter(name => /^train\/(kl|entropy)_coef/.test(name));
const drawn = l => has(l.name) && (!l.bars || data.series[l.name].some(v => v > 0));
const line = (name, label, extra = {}) => ({name, label, ...extra});
const heldOut = (name, label = "held out", extra = {}) => line(name, label, {dots: true, ...extra});
const both = (title, quantity, note, extra = {}) => ({title, note, optional: true, lines: [line(`train/${quantity}`, "training", extra), heldOut(`eval/${quantity}`, "held out", extra)]});
const sides = (title, quantity, unit, note) => ({title, note, optional: true, signed: true, lines: ["chosen", "rejected"].flatMap(side =>
  [line(`train/${quantity}_${side}_${unit}`, side), heldOut(`eval/${quantity}_${side}_${unit}`, `${side}, held out`)])});
const clipped = has("train/clip_frac");
// optional: left out where it was not measured; the others are left out so in loops on written answers only
const charts = [
  {title: "Reward", lines: [line("rollout/reward_mean", "reward"),
    ...(same("rollout/reward_mean", "rollout/success_frac") ? [] : [line("rollout/success_frac", "success fraction", {right: true, format: percent})])],
    note: same("rollout/reward_mean", "rollout/success_frac") ? "Mean reward of training rollouts, here equal to the fraction that succeed" : "Training rollouts: mean reward, and the fraction that succeed"},
  {title: "Held-out accuracy", evals: true, note: "Tasks never trained on, with 95 % intervals", format: percent},
  both("Pairs in order", "preference_accuracy_frac", "Pairs whose chosen answer has the higher score or implied reward", {format: percent}),
  both("Accuracy of steps", "step_accuracy_frac", "Steps whose class is the one the model finds most probable", {format: percent}),
  both("Accuracy of classes", "label_accuracy_frac", "Answers whose class is the median of those the model thinks of", {format: percent}),
  both("Distance to the rating", "rating_error_mean", "In the unit of the ratings"),
  {title: "Negative log-likelihood", optional: true, lines: [line("train/nll_nats", "training"), heldOut("eval/loss_nats")], note: "Of the answers, nats a token"},
  both("Divergence from the teachers", "divergence_nats", "Nats a token"),
  {title: "KL to the start", lines: [line("train/kl_cur_ref_nats", "training rollouts")],
    note: "How far the policy has moved from where it began, nats a token"},
  {title: "Entropy", lines: [line("train/entropy_nats", "entropy"), ...all.filter(name => name.startsWith("train/entropy_nats_")).map(name => line(name, name.slice(19)))], note: "How undecided the policy is about its next token, nats"},
  {title: "Length", lines: [line("rollout/sampled_tokens_mean", "tokens"), line("rollout/truncated_frac", "cut off", {right: true, format: percent})],
    note: "Tokens the policy writes in one rollout, and the fraction cut off by the limit"},
  {title: clipped || data.loop === "sync" ? "Loss and clipping" : "Loss", lines: [line("train/loss", "loss"), heldOut("eval/loss"), line("train/clip_frac", "clipped tokens", {right: true, format: percent})],
    note: data.loop === "sync" ? "The loss of a policy gradient need not fall" : "What is minimised", signed: true},
  {title: "Terms of the loss", optional: true, signed: true, lines: terms.length > 1 ? terms.map(name => line(name, name.slice(11))) : [], note: "What each adds to the loss, its weight included"},
  {...both("Margin of implied rewards", "preference_margin", "That of the chosen answer less that of the rejected one"), signed: true},
  sides("Implied rewards", "reward", "mean", "beta log(cur / ref) of chosen and rejected answers"),
  {...sides("Scores", "score", "mean", "What the reward model gives"), ...(has("train/score_mean") ? {lines: [line("train/score_mean", "training"), heldOut("eval/score_mean")]} : {})},
  sides("Log-probs of answers", "logp", "nats", "Of whole answers, nats"),
  {title: "Speed", lines: [line("rate/generate_tokens_per_s", "generating"), line("rate/train_tokens_per_s", "training")], note: "Tokens a second; training counts the prompts, too", ticks: "~s"},
  {title: "Gradient, learning rate", lines: [line("train/grad_norm", "gradient norm"), line("train/critic_grad_norm", "of the critic"), line("train/lr", "learning rate", {right: true, raw: true})],
    note: "Gradient norm before clipping, and the learning rate of the last update"},
  {title: "Trainer against sampler", lines: [line("train/kl_cur_gen_nats", "KL")], note: "0 when the trainer computes the log-probs the sampler had; nats a token"},
  {title: "Groups without signal", lines: [line("rollout/constant_groups_frac", "constant groups", {format: percent}),
    line("rollout/not_scored_count", "not scored", {right: true, bars: true})], note: "Groups whose rewards are all equal teach nothing; unscored rollouts are left out"},
  {title: "Further rounds of tasks", optional: true, lines: [line("rollout/refill_rounds_count", "rounds")], note: "Drawn in place of groups without signal"},
  {title: "Own answers", optional: true, lines: [line("train/on_policy_frac", "share", {format: percent})], note: "Trained answers that the policy wrote itself"},
  {title: "Reward parts", optional: true, lines: scores.length > 1 ? scores.map(name => line(name, name.slice(14, -5))) : [], note: "Mean score of each reward, before its weight"},
  {title: "Reward by environment", optional: true, lines: places.map(name => line(name, name.slice(15, -5))), note: "Mean reward of the rollouts of each"},
  {title: "Cost and its weight", optional: true, lines: [line("rollout/cost_mean", "cost"), line("train/constraint_multiplier", "multiplier", {right: true, raw: true})], note: "Mean cost of a step, and its weight against the reward"},
  {title: "Critic", optional: true, lines: [line("train/value_error", "squared error"), line("train/critic_loss", "loss", {right: true})], note: "Distance of the critic's values to the returns"},
  {title: "Distance within a step", optional: true, lines: moves("train/kl_cur_prox_nats") ? [line("train/kl_cur_prox_nats", "KL"), line("train/stopped_updates_count", "updates left out", {right: true, bars: true})] : [],
    note: "The policy against where the step began, nats a token; the largest of a step's updates"},
  {title: "Weights for the sampler's distance", optional: true, lines: some("train/correction_ess_frac", v => v < .999) || some("train/correction_dropped_frac", v => v > 0) ?
    [line("train/correction_ess_frac", "effective sample size", {format: percent}), line("train/correction_dropped_frac", "dropped", {format: percent}), line("train/correction_weight_mean", "mean weight", {right: true})] : [],
    note: "1 and nothing dropped where trainer and sampler agree"},
  {title: "Coefficients", optional: true, lines: coefs.some(moves) ? coefs.map(name => line(name, name.slice(6), {raw: true})) : [], note: "Weights that a controller moves"},
];
const QUIET = /^(time|rate|memory)\/|_count$|^eval\/(accuracy_frac|reward_mean|sampled_tokens_mean)$|^train\/(kl_cur_prox_nats|correction_.*|loss_.*|(kl|entropy)_coef.*)$|^rollout\/(score_|success_frac)/;
const charted = new Set(charts.flatMap(chart => chart.lines || []).map(l => l.name));
for (const name of all.filter(name => !charted.has(name) && !QUIET.test(name) && has(name)))
  charts.push({title: name, note: (data.metrics[name] || {}).meaning || "", optional: true, signed: true, lines: [line(name, name, {dots: name.startsWith("eval/")})]});

function smooth(values) {
  const known = values.filter(v => v !== null).length;
  if (known < 25) return null;
  const reach = Math.max(3, Math.round(known / 30));   // on both sides, so that the average does not lag behind
  return values.map((v, i) => {
    if (v === null) return null;
    const part = values.slice(Math.max(0, i - reach), i + reach + 1).filter(w => w !== null);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}

function theme() {
  return {ink: css("--ink"), muted: css("--muted"), line: css("--line"), card: css("--card"), colors: [0, 1, 2, 3, 4, 5].map(i => css("--c" + i))};
}

const isPercent = chart => chart.format === percent || (chart.lines || []).some(l => !l.right && l.format === percent);
const coarse = matchMedia("(pointer: coarse)").matches;

function layout(t, more) {
  const axis = {gridcolor: t.line, zerolinecolor: t.line, linecolor: t.line, tickfont: {size: 11}, tickmode: "auto", exponentformat: "e", automargin: true, fixedrange: coarse};
  const {yaxis, yaxis2, xaxis, ...rest} = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: t.muted, size: 12, family: "system-ui, sans-serif"},
    margin: {l: 44, r: yaxis2 ? 44 : 10, t: 8, b: 34}, showlegend: false, hovermode: "x unified", dragmode: coarse ? false : "zoom",
    hoverlabel: {bgcolor: t.card, bordercolor: t.line, font: {color: t.ink, size: 12}},
    xaxis: {...axis, title: {text: "step", font: {size: 11}, standoff: 4}, ...xaxis},
    yaxis: {...axis, nticks: 5, ...yaxis}, ...(yaxis2 ? {yaxis2: {...axis, nticks: 5, overlaying: "y", side: "right", showgrid: false, ...yaxis2}} : {}),
    ...rest,
  };
}

function lineTraces(chart, t) {
  const traces = [];
  chart.lines.filter(drawn).forEach((l, i) => {
    const y = data.series[l.name], axis = l.right ? "y2" : "y", color = t.colors[i % t.colors.length];
    const hover = l.format === percent ? "%{y:.1%}" : "%{y:.4g}";
    const known = y.filter(v => v !== null).length;
    const base = {x: data.steps, y, yaxis: axis, name: l.label, connectgaps: true, hovertemplate: hover, type: "scatter"};
    if (l.bars) return traces.push({...base, type: "bar", connectgaps: undefined, marker: {color, line: {width: 0}}});
    const trend = l.raw || l.dots ? null : smooth(y);
    const dots = l.dots || known < 25;
    const dash = l.right ? "dot" : "solid";
    traces.push({...base, mode: dots ? "lines+markers" : "lines", marker: {size: 5, color}, opacity: trend ? .35 : 1, line: {color, width: trend ? 1 : 2, dash: trend ? "solid" : dash}});
    if (trend) traces.push({...base, y: trend, mode: "lines", hoverinfo: "skip", hovertemplate: null, line: {color, width: 2.5, dash}});
  });
  return traces;
}

function evalTraces(t) {
  const points = data.evals, known = points.filter(p => p.low !== null), color = t.colors[0];
  const text = points.map(p => p.low === null ? "interval not known" : `${percent(p.low)} to ${percent(p.high)}, ${p.num_items} items`);
  return [{
    type: "scatter", mode: "lines+markers", x: points.map(p => p.step), y: points.map(p => p.accuracy_frac), customdata: text, name: "accuracy",
    line: {color, width: 2}, marker: {size: points.length > 40 ? 4 : 7, color}, hovertemplate: "%{y:.1%} (%{customdata})",
    error_y: known.length ? {type: "data", symmetric: false, array: points.map(p => p.low === null ? 0 : p.high - p.accuracy_frac),
      arrayminus: points.map(p => p.low === null ? 0 : p.accuracy_frac - p.low), color, thickness: 1.2, width: 4} : undefined,
  }];
}

function barTick(name) {
  return Math.max(1, Math.ceil(Math.max(...data.series[name].filter(v => v !== null)) / 4));
}

function latest(chart) {
  if (chart.evals) return data.evals.length ? percent(data.evals.at(-1).accuracy_frac) : "";
  const first = chart.lines.find(l => has(l.name));
  if (!first) return "";
  return (first.format || number)(data.series[first.name].filter(v => v !== null).at(-1));
}

function buildCharts() {
  for (const chart of charts) {
    const shown = chart.evals ? data.evals.length : chart.lines.some(l => has(l.name));
    if (!shown && (chart.optional || data.loop !== "sync")) continue;
    const key = el("div", {class: "key"});
    const plot = shown ? el("div", {class: "plot"}) : el("p", {class: "none"}, "Not measured in this run.");
    $("charts").append(el("div", {class: "card chart"}, el("div", {class: "title"}, el("h3", {}, chart.title), el("span", {class: "now", title: "latest value"}, latest(chart))), el("p", {class: "means"}, chart.note), plot, key));
    Object.assign(chart, {plot: shown ? plot : null, key});
  }
  const every = data.every > 1 ? ` Each point stands for ${data.every} steps.` : "";
  $("curves-hint").textContent = `Thin lines are the values, thick ones their moving average; what is dotted or a bar belongs to the right axis. The number in a corner is the latest value.${every}`;
}

function drawCharts() {
  const t = theme(), config = {displayModeBar: false, responsive: true, showTips: false};
  for (const chart of charts.filter(c => c.plot)) {
    const traces = chart.evals ? evalTraces(t) : lineTraces(chart, t);
    const right = (chart.lines || []).find(l => l.right && drawn(l));
    const left = isPercent(chart) ? {tickformat: ".1~%", rangemode: "tozero"} : {rangemode: chart.signed ? "normal" : "tozero", ...(chart.ticks ? {tickformat: chart.ticks} : {})};
    Plotly.react(chart.plot, traces, layout(t, {yaxis: left, ...(right ? {yaxis2: right.format === percent ? {tickformat: ".1~%", rangemode: "tozero"} : {rangemode: "tozero", ...(right.bars ? {dtick: barTick(right.name)} : {})}} : {})}), config);
    const lines = (chart.lines || []).filter(drawn);
    chart.key.replaceChildren(...(lines.length > 1 ? lines.map((l, i) => el("span", {}, el("i", {style: `background:${t.colors[i % t.colors.length]}`}), l.label + (l.right ? " (right)" : ""))) : []));
  }
  if ($("ledger-plot")) drawLedger(t, config);
}

function drawLedger(t, config) {
  const order = ["generate", "reward", "train", "evaluate", "checkpoint"];
  const measured = Object.keys(data.series).filter(n => n.startsWith("time/") && n !== "time/step_s").map(n => n.slice(5, -2));
  const phases = [...order.filter(p => measured.includes(p)), ...measured.filter(p => !order.includes(p) && p !== "other"), ...measured.filter(p => p === "other")];
  const traces = phases.map(phase => ({
    type: "bar", name: phase, x: data.steps, y: data.series[`time/${phase}_s`], hovertemplate: "%{y:.2f} s",
    marker: {color: order.includes(phase) ? t.colors[[0, 2, 1, 3, 4][order.indexOf(phase)]] : t.colors[5], line: {width: 0}},
  }));
  Plotly.react($("ledger-plot"), traces, layout(t, {barmode: "stack", bargap: data.steps.length > 80 ? 0 : .15, yaxis: {title: {text: "seconds", font: {size: 11}}, rangemode: "tozero"}}), config);
}

// ---- rollouts ----------------------------------------------------------------------------------
const failed = r => r.reward === null || Object.keys(r.errors).length > 0;
const filters = {all: () => true, training: r => r.where === "training", "held-out": r => r.where === "held-out", failed};
let shown = [], chosen = 0;

function reward(r) {
  const kind = r.reward === null ? "none" : r.reward >= data.success_reward ? "high" : r.reward > 0 ? "some" : "low";
  return el("span", {class: `reward ${kind}`}, r.reward === null ? "not scored" : number(r.reward));
}

function buildFilters() {
  for (const [name, test] of Object.entries(filters)) {
    const count = data.rollouts.filter(test).length;
    $("filters").append(el("button", {type: "button", "data-filter": name, "aria-pressed": String(name === "all"), onclick: () => list(name)}, `${name} (${count})`));
  }
}

function list(filter) {
  for (const button of $("filters").children) button.setAttribute("aria-pressed", String(button.dataset.filter === filter));
  shown = data.rollouts.filter(filters[filter]);
  const nodes = [];
  let head = null;
  shown.forEach((r, i) => {
    const title = `${r.where === "held-out" ? "held-out evaluation" : "training"}, step ${r.step}`;
    if (title !== head) nodes.push(el("div", {class: "head", role: "presentation"}, head = title));
    nodes.push(el("div", {class: "item", role: "option", id: `item-${i}`, "data-i": i, title: r.task, onclick: () => show(i)}, el("span", {}, ...(r.where === "held-out" ? [] : [el("b", {}, r.why)]), el("i", {}, r.label)), reward(r)));
  });
  $("list").replaceChildren(...nodes);
  if (shown.length) show(0);
  else $("detail").replaceChildren(el("p", {class: "none"}, "No rollout of this kind on this page."));
}

function show(i) {
  chosen = i;
  for (const item of $("list").querySelectorAll(".item")) item.setAttribute("aria-selected", String(+item.dataset.i === i));
  const item = $(`item-${i}`), box = $("list");
  $("list").setAttribute("aria-activedescendant", item.id);
  if (item.offsetTop < box.scrollTop + 36) box.scrollTop = item.offsetTop - 36;
  if (item.offsetTop + item.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = item.offsetTop + item.offsetHeight - box.clientHeight;
  hideTip();
  $("detail").replaceChildren(...detail(shown[i]));
}

function detail(r) {
  const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  const nodes = [
    el("div", {class: "move"}, el("button", {type: "button", id: "prev", title: "Previous rollout", onclick: () => show((chosen + shown.length - 1) % shown.length)}, "<"),
      el("button", {type: "button", id: "next", title: "Next rollout", onclick: () => show((chosen + 1) % shown.length)}, ">")),
    el("h3", {}, `${r.where}, step ${r.step}, task ${r.task}`),
    el("dl", {class: "facts"}, fact("reward", reward(r)), ...Object.entries(r.scores).map(([name, v]) => fact(`score ${name}`, v === null ? "none" : number(v))),
      ...(r.advantage === null ? [] : [fact("advantage", number(r.advantage))]), fact("ended by", r.stop.replace("_", " ")), fact("tokens written", `${r.num_sampled} of ${r.num_tokens}`),
      fact("sample", String(r.sample)), fact("weights", `version ${r.version}`), fact("expected", r.answer)),
    ...Object.entries(r.errors).map(([name, text]) => el("p", {class: "alert bad"}, `${name}: ${text}`)),
    ...(r.stop.startsWith("error") ? [el("p", {class: "alert bad"}, r.stop)] : []),
  ];
  return [...nodes, ...blocks(r)];
}

const AUTHORS = {p: "prompt", s: "policy", e: "environment"};

function blocks(r) {
  const out = [];
  let box = null, author = null;
  [...r.who].forEach((who, i) => {
    if (who !== author) {
      author = who;
      box = el("div", {class: "tokens" + (who === "s" ? "" : " long")});
      out.push(el("div", {class: "block"}, el("p", {}, who === "s" ? "the policy wrote" : AUTHORS[who]), box));
    }
    if (r.gap === i) box.append(el("span", {class: "gap"}, `${r.left_out.toLocaleString("en")} tokens are left out here; the run directory holds them`));
    box.append(token(r, i));
  });
  return out;
}

function token(r, i) {
  const text = r.texts[i], who = r.who[i], logp = r.logp[i];
  const visible = text === "" ? `[${r.ids[i]}]` : /^\n+$/.test(text) ? "\u21b5" + text : text;
  const heat = who !== "s" ? null : logp === null ? 1 : Math.min(1, Math.max(0, -logp / 6));
  const style = heat === null ? null : `background:rgba(var(--heat),${(heat * .85).toFixed(3)})`;
  return el("span", {class: `t ${who}` + (text === "" || /^<\|?.+\|?>$/.test(text) ? " special" : ""), "data-i": i, style}, visible);
}

function tipText(r, i) {
  const text = JSON.stringify(r.texts[i]), who = AUTHORS[r.who[i]];
  const lines = [`${text}`, `token id ${r.ids[i]}`, `written by ${who === "policy" ? "the policy" : who === "prompt" ? "the prompt" : "the environment"}`];
  if (r.who[i] === "s") lines.push(r.logp[i] === null ? "log-prob not finite" : `log-prob ${r.logp[i].toFixed(3)} nats (probability ${percent(Math.exp(r.logp[i]))})`);
  return lines.join("\n");
}

function showTip(node) {
  const tip = $("tip");
  for (const on of document.querySelectorAll(".t.on")) on.classList.remove("on");
  node.classList.add("on");
  tip.textContent = tipText(shown[chosen], +node.dataset.i);
  tip.hidden = false;
  const at = node.getClientRects()[0], size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left), document.documentElement.clientWidth - size.width - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${at.top - size.height - 8 > 60 ? at.top - size.height - 8 : at.bottom + 8}px`;
}

function hideTip() {
  $("tip").hidden = true;
  for (const on of document.querySelectorAll(".t.on")) on.classList.remove("on");
}

function listen() {
  const tokenOf = event => event.target.closest ? event.target.closest(".tokens .t") : null;
  for (const kind of ["pointerover", "pointermove"]) $("detail").addEventListener(kind, event => {   // a move, too: scrolling hides the tip under a still pointer
    const node = tokenOf(event);
    if (!node) hideTip();
    else if ($("tip").hidden || !node.classList.contains("on")) showTip(node);
  });
  $("detail").addEventListener("pointerleave", event => event.pointerType === "mouse" && hideTip());
  $("detail").addEventListener("click", event => tokenOf(event) && showTip(tokenOf(event)));
  addEventListener("scroll", hideTip, {passive: true});
  $("list").addEventListener("keydown", event => {
    const move = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (move && shown.length) { event.preventDefault(); show(Math.min(shown.length - 1, Math.max(0, chosen + move))); }
  });
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  drawCharts();
}

buildCharts();
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => setTheme(event.matches ? "dark" : "light"));
if ($("list")) {         // a run on written answers may have no rollouts
  buildFilters();
  list("all");
  listen();
}
document.documentElement.dataset.ready = "yes";
})();
