"use strict";
/* Draws the charts of a report from its embedded data: report.charts says which, report.runs holds columns
   (see columns.py). */

const report = JSON.parse(document.getElementById("report-data").textContent);
const runs = report.runs;
const several = runs.length > 1;
const root = document.documentElement;
const nav = document.querySelector("nav");
const AXES = {
  step: ["step", "train step"],
  samples: ["samples", "samples trained"],
  time: ["time_s", "run time, s"],
};
/* Okabe and Ito's colours, which people with any colour vision tell apart; lines differ in dash, too. */
const COLOURS = {
  light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"],
  dark: ["#56B4E9", "#E69F00", "#2BC79A", "#E7A1C6", "#F0E442", "#4F9BE0", "#FFFFFF"],
};
const SHADES = {
  light: [[0, "#eef2f6"], [0.5, "#5a9bd4"], [1, "#08306b"]],
  dark: [[0, "#1d242d"], [0.5, "#2f6fa8"], [1, "#b7e0ff"]],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
/* Work is dark or saturated, waiting is bright. */
const PARTS = {
  busy: "#0072B2", train: "#0072B2", scoring: "#56B4E9", old_logprob: "#56B4E9", ref: "#8DA0CB", values: "#A65628",
  wait_data: "#F0E442", wait_scores: "#B8DE9A", starved: "#F0E442", "waiting for tools": "#CC79A7",
  eval: "#CC79A7", blocked: "#E69F00", checkpoint: "#E69F00", syncing: "#009E73", gather: "#009E73",
  sending: "#66A61E", loading: "#D55E00", paused: "#999999", other: "#999999", failed: "#7A0000", done: "#DDDDDD",
};
const PLACES = Object.keys(PARTS);
const SYMBOLS = {
  eval: ["diamond", "◆"], checkpoint: ["square", "■"], resume: ["triangle-right", "▶"],
  restart: ["triangle-up", "▲"], "worker lost": ["triangle-down", "▼"], failure: ["x", "✕"],
  warning: ["cross", "✚"],
};
const MOST_MARKS = 60;
const GRAVE = ["resume", "restart", "worker lost", "failure"];
const QUANTILES = { low: 2, quarter: 10, median: 20, three: 30, high: 38 };

let axis = several ? "samples" : "step";
let theme = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
let zooming = false;

const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const colour = (place) => COLOURS[theme][place % COLOURS[theme].length];
const xs = (run) => run.columns[AXES[axis][0]];
const has = (run, key) => (run.columns[key] || []).some((value) => value !== null);
const short = (key, chart) => key.slice(chart.prefix.length).replace(/_s$/, "");
/* For joined steps, a maximum is the largest of them. */
const ys = (run, key, label) => (label === "max" && run.highs[key]) || run.columns[key];
const faded = (hex, opacity) => hex + Math.round(opacity * 255).toString(16).padStart(2, "0");
const isTimeline = (chart) => chart.kind === "timeline";
const perRun = (chart) => ["parts", "histogram", "quantiles", "timeline"].includes(chart.kind);
/* The colour of a run where there are several, else the figure's own. */
const tintOf = (place, own) => (several ? colour(place) : own);
const inOrder = (keys, partOf) =>
  keys.sort((one, other) => PLACES.indexOf(partOf(one)) - PLACES.indexOf(partOf(other)));

function partsOf(run, chart) {
  const isPart = (key) => key.startsWith(chart.prefix) && key !== "timing/step_s";
  const keys = Object.keys(run.columns).filter((key) => isPart(key) && has(run, key));
  return inOrder(keys, (key) => short(key, chart));
}

/* `more`: further keys of the layout; `ofX`, `ofY`: of its axes. */
function layout(chart, more, ofY = {}, ofX = {}) {
  const line = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
  const percent = chart.unit === "share" ? { tickformat: ".1~%" } : {};
  const unit = chart.unit === "share" ? "" : chart.unit;
  const mayBeNegative = ["reward", "any", "each"].includes(chart.kind) || chart.unit === "nats";
  return {
    autosize: true, margin: { l: 48, r: 10, t: 8, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
    xaxis: { ...line, ...aligned(chart), title: { text: AXES[axis][1], standoff: 6 }, ...ofX },
    yaxis: {
      ...line, ...percent, title: { text: unit, standoff: 4 }, type: chart.log ? "log" : "linear",
      rangemode: mayBeNegative ? "normal" : "nonnegative",
      dtick: chart.log ? 1 : null, exponentformat: "power", ...ofY,
    },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--card"), font: { color: css("--ink") } }, ...more,
  };
}

/* Plots of one run each have the same range, so that they can be compared by eye. */
function aligned(chart) {
  if (!several || !perRun(chart)) return {};
  const ends = runs.map((run) => (isTimeline(chart) ? run.columns.time_s : xs(run)).at(-1));
  return { range: [0, Math.max(...ends)] };
}

/* The events to mark, except regular ones that are so frequent that their marks would form a bar. */
function kindsOf(run) {
  return Object.keys(SYMBOLS).filter((kind) => {
    const number = run.marks.filter((mark) => mark.kind === kind).length;
    return number > 0 && (number < MOST_MARKS || GRAVE.includes(kind));
  });
}

/* Marks of a run at the foot of a chart, and lines where it was interrupted. */
function marks(run, place) {
  return kindsOf(run).map((kind) => {
    const own = run.marks.filter((mark) => mark.kind === kind);
    return {
      type: "scatter", mode: "markers", name: kind, yaxis: "y2", cliponaxis: false,
      x: own.map((mark) => mark[AXES[axis][0]]), y: own.map(() => 0.015), text: own.map((mark) => mark.text),
      hovertemplate: "%{text}<extra></extra>",
      marker: { symbol: SYMBOLS[kind][0], size: 8, color: tintOf(place, css("--ink")), opacity: 0.8 },
    };
  });
}

function rules(run, place) {
  const line = { color: tintOf(place, css("--dim")), width: 1, dash: "dot" };
  return run.marks.filter((mark) => GRAVE.includes(mark.kind)).slice(0, MOST_MARKS).map((mark) => {
    const x = mark[AXES[axis][0]];
    return { type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line };
  });
}

function limits(chart, shown) {
  const [key, label] = chart.limit;
  const shift = chart.kind === "histogram" ? 0.5 : 0;
  const values = key ? [...new Set(shown.map((run) => run.limits[key]))] : [];
  const line = { color: css("--bad"), width: 2, dash: "dash" };
  const inPlot = { xref: "paper", yref: "y" };
  return {
    shapes: values.map((value) => value + shift).map((y) => ({
      ...inPlot, type: "line", x0: 0, x1: 1, y0: y, y1: y, line,
    })),
    annotations: values.map((value) => ({
      ...inPlot, x: 1, xanchor: "right", y: chart.log ? Math.log10(value) : value + shift, yanchor: "bottom",
      showarrow: false, font: { color: css("--bad") }, bgcolor: css("--card"), borderpad: 0,
      text: `${label} ${value}`,
    })),
  };
}

function envelope(run, key, tint) {
  if (!run.lows[key]) return [];
  const line = { width: 0 };
  const edge = { type: "scatter", mode: "lines", x: xs(run), line, hoverinfo: "skip", name: "" };
  const filled = { fill: "tonexty", fillcolor: faded(tint, 0.18) };
  return [{ ...edge, y: run.lows[key] }, { ...edge, y: run.highs[key], ...filled }];
}

function lineTraces(chart, run, place) {
  const shown = chart.series.filter(([key]) => has(run, key));
  return shown.flatMap(([key, label], number) => {
    const tint = tintOf(place, colour(number));
    const name = several ? (chart.series.length > 1 ? `${run.name}: ${label}` : run.name) : label;
    const line = { color: tint, width: 2, dash: DASHES[number % DASHES.length] };
    const figures = { x: xs(run), y: ys(run, key, label) };
    const trace = { type: "scatter", mode: "lines", connectgaps: true, name, ...figures, line };
    return [...(shown.length === 1 ? envelope(run, key, tint) : []), trace];
  });
}

function evalTraces(run, place) {
  return [...new Set(run.evals.map((one) => one.eval_set || ""))].map((set, number) => {
    const own = run.evals.filter((one) => (one.eval_set || "") === set);
    const name = `${several ? run.name + ": " : ""}eval ${set}`.trim();
    const tint = tintOf(place, colour(number + 1));
    const reach = (key) => own.map((one) => (one[key] === null ? 0 : Math.abs(one[key] - one.reward_mean)));
    return {
      type: "scatter", mode: "lines+markers", name,
      x: own.map((one) => one[AXES[axis][0]]), y: own.map((one) => one.reward_mean),
      text: own.map((one) => `version ${one.version}`), hovertemplate: "%{y:.3f} (%{text})",
      error_y: {
        type: "data", symmetric: false, array: reach("reward_high"), arrayminus: reach("reward_low"),
        color: tint, thickness: 1, width: 4,
      },
      line: { color: tint, width: 2, dash: "dot" },
      marker: {
        size: own.length > MOST_MARKS ? 4 : 10, symbol: ["diamond", "circle", "square", "star"][number % 4],
        line: { color: css("--paper"), width: 1 },
      },
    };
  });
}

/* Executors report once a second: a shorter step may have no shares, and then no point. */
function partTraces(chart, run) {
  const keys = partsOf(run, chart);
  const hasShares = (point) => keys.some((key) => run.columns[key][point] !== null);
  const points = xs(run).map((_, point) => point).filter(hasShares);
  return keys.map((key) => {
    const name = short(key, chart);
    const color = PARTS[name] || "#999999";
    return {
      type: "scatter", mode: "lines", stackgroup: "one", name, line: { width: 0.5, color }, fillcolor: color,
      x: points.map((point) => xs(run)[point]), y: points.map((point) => run.columns[key][point] || 0),
    };
  });
}

function levelsOf(chart, run) {
  const rows = run.columns[chart.series[0][0]];
  const limit = chart.limit[0] ? run.limits[chart.limit[0]] : 0;
  return rows.reduce((most, row) => Math.max(most, (row || []).length - 1), limit);
}

function histogramTraces(chart, run) {
  const rows = run.columns[chart.series[0][0]];
  const top = levelsOf(chart, run);
  const totals = rows.map((row) => (row || []).reduce((sum, value) => sum + value, 0));
  const levels = [...Array(top + 1).keys()];
  const shareOf = (level) => (row, point) => (row ? (row[level] || 0) / totals[point] : null);
  return [{
    type: "heatmap", x: xs(run), y: levels, z: levels.map((level) => rows.map(shareOf(level))),
    zmin: 0, zmax: 1, colorscale: SHADES[theme],
    hovertemplate: `${chart.series[0][1]} %{y}: %{z:.0%}<extra></extra>`,
    colorbar: { tickformat: ".0%", thickness: 10, len: 1, outlinewidth: 0 },
  }];
}

function quantileTraces(chart, run) {
  const rows = run.columns[chart.series[0][0]];
  const at = (place) => rows.map((row) => (row ? row[place] : null));
  const base = { type: "scatter", mode: "lines", x: xs(run), connectgaps: true };
  const band = (low, high, name, opacity) => {
    const edge = { ...base, line: { width: 0 }, hoverinfo: "skip" };
    const filled = { fill: "tonexty", fillcolor: faded(colour(0), opacity) };
    return [{ ...edge, y: at(low), name: "" }, { ...edge, y: at(high), name, ...filled }];
  };
  const longest = { name: "longest", line: { color: colour(1), width: 1, dash: "dot" } };
  return [
    ...band(QUANTILES.low, QUANTILES.high, "5% to 95%", 0.2),
    ...band(QUANTILES.quarter, QUANTILES.three, "25% to 75%", 0.35),
    { ...base, y: at(QUANTILES.median), name: "median", line: { color: colour(0), width: 2 } },
    { ...base, y: ys(run, "response_tokens/max", "max"), ...longest },
  ];
}

/* A state's stays are one line per executor row, broken between them: one path, however many stays there
   are. */
function timelineTraces(run, names) {
  const width = rowHeight(names) * 0.62;
  const states = [...new Set(names.flatMap((name) => Object.keys(run.timeline.executors[name])))];
  const traces = inOrder(states, (state) => state).map((state) => {
    const x = [], y = [], text = [];
    names.forEach((name, row) => {
      const stays = run.timeline.executors[name][state] || [];
      for (let place = 0; place < stays.length; place += 2) {
        const stay = `${name}: ${state} ${stays[place + 1].toPrecision(3)} s`;
        x.push(stays[place], stays[place] + stays[place + 1], null);
        y.push(row, row, null);
        text.push(stay, stay, "");
      }
    });
    return {
      type: "scatter", mode: "lines", name: state, x, y, text,
      hovertemplate: "%{text}, at %{x:.1f} s<extra></extra>",
      line: { color: PARTS[state] || "#999999", width, simplify: false },
    };
  });
  const ends = traces.flatMap((trace) => [trace.x[0], trace.x.at(-2)]);
  const inside = run.published_s.filter((time) => time >= Math.min(...ends) && time <= Math.max(...ends));
  const few = inside.length <= MOST_MARKS ? inside : [];
  const x = few.flatMap((time) => [time, time, null]);
  const y = few.flatMap(() => [-0.6, names.length - 0.4, null]);
  const line = { color: css("--ink"), width: 1, dash: "dot" };
  return [...traces, { type: "scatter", mode: "lines", name: "new version", x, y, hoverinfo: "skip", line }];
}

const rowHeight = (names) => (names.length > 24 ? 12 : 26);

function figureOf(chart, shown) {
  const [run] = shown;
  const small = root.clientWidth < 600;
  const all = (traces) => shown.flatMap((one) => traces(one, runs.indexOf(one)));
  const limit = limits(chart, shown);
  const shapes = [...all(rules), ...limit.shapes];
  const more = { height: small ? 230 : 260, shapes, annotations: limit.annotations };
  switch (chart.kind) {
    case "parts": {
      const amounts = chart.unit === "share" ? { range: [0, 1] } : { rangemode: "tozero" };
      return [[...partTraces(chart, run), ...all(marks)], layout(chart, more, amounts)];
    }
    case "histogram": {
      const range = [-0.5, levelsOf(chart, run) + 0.8];
      const ages = { dtick: 1, title: { text: chart.series[0][1] }, range };
      const lower = { ...more, height: small ? 200 : 220, hovermode: "closest" };
      return [histogramTraces(chart, run), layout(chart, lower, ages)];
    }
    case "quantiles":
      return [[...quantileTraces(chart, run), ...all(marks)], layout(chart, more)];
    case "timeline": {
      const names = Object.keys(run.timeline.executors);
      const rows = {
        tickvals: names.map((_, row) => row), ticktext: names, range: [names.length - 0.3, -0.7],
        fixedrange: true, showgrid: false,
      };
      const plain = { height: names.length * rowHeight(names) + 60, hovermode: "closest", shapes: [] };
      return [timelineTraces(run, names), layout(chart, plain, rows, { title: { text: AXES.time[1] } })];
    }
    default: {
      const evals = chart.kind === "reward" ? all(evalTraces) : [];
      const lines = all((one, place) => lineTraces(chart, one, place));
      return [[...lines, ...evals, ...all(marks)], layout(chart, more)];
    }
  }
}

function hasData(chart, run) {
  if (chart.kind === "any") return true;
  if (isTimeline(chart)) return Object.keys(run.timeline.executors).length > 0;
  if (chart.kind === "parts") return partsOf(run, chart).length > 0;
  return chart.series.some(([key]) => has(run, key)) || (chart.kind === "reward" && run.evals.length > 0);
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
  made.append(...children);
  return made;
}

function noteOf(chart, shown) {
  if (isTimeline(chart)) {
    return shown.filter((run) => run.timeline.merged_s > 0).map((run) => {
      const cells = `merged within cells of ${run.timeline.merged_s.toPrecision(2)} s, shares kept`;
      return ` ${run.name}: ${cells}; asyncrl trace has every stay.`;
    }).join("");
  }
  const joined = shown.find((run) => run.steps_per_point > 1);
  return joined ? ` Each point is the mean of ${joined.steps_per_point} train steps.` : "";
}

/* One plot per chart, or one per run where runs cannot share it. Returns [chart, runs shown, div] of each
   plot. */
function build() {
  const plots = [];
  const host = document.getElementById("charts");
  const kinds = Object.keys(SYMBOLS).filter((kind) => runs.some((run) => kindsOf(run).includes(kind)));
  if (kinds.length) {
    const symbols = kinds.map((kind) => `${SYMBOLS[kind][1]} ${kind}`).join("  ");
    host.append(element("p", { class: "dim" }, "At the foot of the charts: " + symbols));
  }
  for (const section of new Set(report.charts.map((chart) => chart.section))) {
    const grid = element("div", { class: "charts" });
    for (const chart of report.charts.filter((one) => one.section === section)) {
      const shown = runs.filter((run) => hasData(chart, run));
      if (!shown.length) continue;
      const apart = several && perRun(chart);
      const isWide = apart || isTimeline(chart);
      const card = element("div", { class: "chart card" + (isWide ? " wide" : "") });
      const panels = element("div", { class: apart && !isTimeline(chart) ? "beside" : "" });
      const note = element("p", {}, chart.note + noteOf(chart, shown));
      card.append(element("h3", {}, chart.title), note, panels);
      if (chart.kind === "any") panels.before(...chooser(chart));
      for (const group of perRun(chart) ? shown.map((run) => [run]) : [shown]) {
        const div = element("div", { class: "plot", "data-title": chart.title });
        const name = apart ? [element("div", { class: "panel-name" }, group[0].name)] : [];
        panels.append(element("div", { class: "panel" }, ...name, div, element("div", { class: "legend" })));
        plots.push([chart, group, div]);
      }
      grid.append(card);
    }
    if (grid.children.length) host.append(element("section", {}, element("h2", {}, section), grid));
  }
  return plots;
}

/* A list of all figures, and what the chosen one means. */
function chooser(chart) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.columns)))].sort();
  const hasNumbers = (column) => (column || []).some((value) => typeof value === "number");
  const numbers = keys.filter((key) => runs.some((run) => hasNumbers(run.columns[key])));
  const options = numbers.map((key) => element("option", { value: key }, key));
  const select = element("select", { "aria-label": "figure" }, ...options);
  const meaning = element("p", {});
  const choose = (key) => {
    select.value = key;
    chart.series = [[key, key]];
    meaning.textContent = report.meanings[key] || "";
  };
  choose(numbers.includes("reward/std") ? "reward/std" : numbers[0]);
  select.addEventListener("change", () => {
    choose(select.value);
    draw(plots.filter(([one]) => one === chart));
  });
  return [select, meaning];
}

/* A zoom of one chart is a zoom of all with the same axis. */
function zoom(changed, from) {
  const all = "xaxis.autorange" in changed;
  if (zooming || !(all || "xaxis.range[0]" in changed)) return;
  zooming = true;
  const isTime = (chart) => isTimeline(chart) || axis === "time";
  const ends = [changed["xaxis.range[0]"], changed["xaxis.range[1]"]];
  const range = all ? { "xaxis.autorange": true } : { "xaxis.range": ends };
  const others = plots.filter(([chart, , div]) => div !== from[2] && isTime(chart) === isTime(from[0]));
  Promise.all(others.map(([, , div]) => Plotly.relayout(div, range))).then(() => { zooming = false; });
}

const SWATCHES = {
  solid: "none", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "12 4", longdashdot: "12 3 2 3",
};

function swatch(tint, dash) {
  const stroke = `stroke="${tint}" stroke-width="3" stroke-dasharray="${SWATCHES[dash]}"`;
  const line = `<svg width="26" height="4" ${stroke}><path d="M0 2H26"/></svg>`;
  const area = `<i style="background: ${tint}"></i>`;
  return document.createRange().createContextualFragment(dash ? line : area);
}

/* What a trace's name stands for; a click hides it. */
function legend(div, least) {
  const isNamed = ([trace]) => trace.name && trace.type !== "heatmap" && trace.mode !== "markers";
  const named = div.data.map((trace, number) => [trace, number]).filter(isNamed);
  div.nextSibling.replaceChildren(...(named.length < least ? [] : named).map(([trace, number]) => {
    const tint = trace.fillcolor || trace.line.color;
    const isArea = trace.fillcolor || trace.line.width > 4;
    const sample = swatch(tint, isArea ? "" : trace.line.dash || "solid");
    const chip = element("button", { "aria-pressed": "false" }, sample, trace.name);
    chip.addEventListener("click", () => {
      const hidden = div.data[number].visible === "legendonly";
      chip.classList.toggle("hidden", !hidden);
      Plotly.restyle(div, { visible: hidden ? true : "legendonly" }, [number]);
    });
    return chip;
  }));
}

async function draw(which) {
  const config = { responsive: true, displayModeBar: false };
  for (const plot of which) {
    const [chart, shown, div] = plot;
    const isNew = !div.data;
    const [data, made] = figureOf(chart, shown);
    await Plotly.react(div, data, made, config);
    legend(div, chart.series.length > 1 ? 1 : 2);
    if (isNew) div.on("plotly_relayout", (changed) => zoom(changed, plot));
  }
}

async function show(next) {
  ({ axis = axis, theme = theme } = next);
  root.dataset.theme = theme;
  for (const button of nav.querySelectorAll("[data-axis]")) {
    button.setAttribute("aria-pressed", button.dataset.axis === axis);
  }
  const other = nav.querySelector("[data-theme]");
  other.dataset.theme = other.textContent = theme === "dark" ? "light" : "dark";
  await draw(plots);
}

/* Paper is white and 190 mm wide. */
function print() {
  const before = theme;
  root.dataset.theme = theme = "light";
  plots.forEach(([chart, shown, div]) => {
    const [data, made] = figureOf(chart, shown);
    Plotly.react(div, data, { ...made, autosize: false, width: 680 });
  });
  const restore = () => { root.dataset.theme = theme = before; draw(plots); };
  window.addEventListener("afterprint", restore, { once: true });
}

root.dataset.theme = theme;
const plots = build();
nav.querySelectorAll("button").forEach((one) => one.addEventListener("click", () => show(one.dataset)));
window.addEventListener("beforeprint", print);

/* The plotting library is embedded compressed. */
async function library() {
  const text = atob(document.getElementById("plotly").textContent);
  const packed = Uint8Array.from(text, (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(element("script", {}, await new Response(stream).text()));
}

library().then(() => show({})).then(() => { root.dataset.drawn = String(plots.length); }).catch((error) => {
  const words = `The charts cannot be drawn: ${error}. A browser of 2023 or newer can.`;
  document.getElementById("charts").append(element("p", {}, words));
  throw error;
});
