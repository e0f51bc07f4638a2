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
const scores = Object.keys(data.series).filter(name => name.startsWith("rollout/score_"));
const drawn = l => has(l.name) && (!l.bars || data.series[l.name].some(v => v > 0));
const line = (name, label, extra = {}) => ({name, label, ...extra});
const charts = [
  {title: "Reward", lines: [line("rollout/reward_mean", "reward"),
    ...(same("rollout/reward_mean", "rollout/success_frac") ? [] : [line("rollout/success_frac", "success fraction", {right: true, format: percent})])],
    note: same("rollout/reward_mean", "rollout/success_frac") ? "Mean reward of training rollouts, here equal to the fraction that succeed" : "Training rollouts: mean reward, and the fraction that succeed"},
  {title: "Held-out accuracy", evals: true, note: "Tasks never trained on, with 95 % intervals", format: percent},
  {title: "KL to the start", lines: [line("train/kl_cur_ref_nats", "training rollouts")],
    note: "How far the policy has moved from where it began, nats a token"},
  {title: "Entropy", lines: [line("train/entropy_nats", "entropy")], note: "How undecided the policy is about its next token, nats"},
  {title: "Length", lines: [line("rollout/sampled_tokens_mean", "tokens"), line("rollout/truncated_frac", "cut off", {right: true, format: percent})],
    note: "Tokens the policy writes in one rollout, and the fraction cut off by the limit"},
  {title: "Speed", lines: [line("rate/generate_tokens_per_s", "generating"), line("rate/train_tokens_per_s", "training")], note: "Tokens a second; training counts the prompts, too", ticks: "~s"},
  {title: "Gradient, learning rate", lines: [line("train/grad_norm", "gradient norm"), line("train/lr", "learning rate", {right: true, raw: true})],
    note: "Gradient norm before clipping, and the learning rate of the last update"},
  {title: "Trainer against sampler", lines: [line("train/kl_cur_gen_nats", "KL")], note: "0 when the trainer computes the log-probs the sampler had; nats a token"},
  {title: "Groups without signal", lines: [line("rollout/constant_groups_frac", "constant groups", {format: percent}),
    line("rollout/not_scored_count", "not scored", {right: true, bars: true})], note: "Groups whose rewards are all equal teach nothing; unscored rollouts are left out"},
  {title: "Loss and clipping", lines: [line("train/loss", "loss"), line("train/clip_frac", "clipped tokens", {right: true, format: percent})], note: "The loss of a policy gradient need not fall"},
  ...(scores.length > 1 ? [{title: "Reward parts", lines: scores.map(name => line(name, name.slice(14, -5))), note: "Mean score of each reward, before its weight"}] : []),
];

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
    const y = data.series[l.name], axis = l.right ? "y2" : "y", color = t.colors[i];
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
    const left = isPercent(chart) ? {tickformat: ".1~%", rangemode: "tozero"} : {rangemode: chart.title.startsWith("Loss") ? "normal" : "tozero", ...(chart.ticks ? {tickformat: chart.ticks} : {})};
    Plotly.react(chart.plot, traces, layout(t, {yaxis: left, ...(right ? {yaxis2: right.format === percent ? {tickformat: ".1~%", rangemode: "tozero"} : {rangemode: "tozero", ...(right.bars ? {dtick: barTick(right.name)} : {})}} : {})}), config);
    const lines = (chart.lines || []).filter(drawn);
    chart.key.replaceChildren(...(lines.length > 1 ? lines.map((l, i) => el("span", {}, el("i", {style: `background:${t.colors[i]}`}), l.label + (l.right ? " (right)" : ""))) : []));
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
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => setTheme(event.matches ? "dark" : "light"));
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  drawCharts();
}

buildCharts();
setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
buildFilters();
list("all");
listen();
document.documentElement.dataset.ready = "yes";
})();
