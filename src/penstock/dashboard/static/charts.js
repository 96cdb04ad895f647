// SPDX-License-Identifier: Apache-2.0
// Line charts by uPlot, which loads when the first chart is drawn.
import { colour, css, figure, html, useDrawing } from "./lib.js";

let loading;
const load = () => loading ||= import("./vendor/uplot.mjs").then((found) => {
  const sheet = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "/vendor/uplot.css" });
  document.head.append(sheet);
  return found.default;
});
const resolved = (name) => css(name.slice(4, -1));

/** series: [{label, steps, values, index, dots}] */
export function LineChart({ title, series, height = 150, width = "w4", unit = "" }) {
  const filled = series.filter((one) => one.steps.length);
  const mark = JSON.stringify(filled.map((one) => [one.label, one.steps.length, one.steps.at(-1), one.values.at(-1)]));
  const place = useDrawing((element, wide) => {
    let plot, stopped = false;
    if (filled.length) load().then((uPlot) => {
      if (stopped) return;
      const steps = [...new Set(filled.flatMap((one) => one.steps))].sort((a, b) => a - b);
      const rows = filled.map((one) => {
        const known = new Map(one.steps.map((step, i) => [step, one.values[i]]));
        return steps.map((step) => known.has(step) ? known.get(step) : undefined);
      });
      const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      plot = new uPlot({
        width: wide, height, padding: [6, 16, 0, 0], legend: { show: false },
        cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
        hooks: { setCursor: [(u) => {
          const i = u.cursor.idx, out = element.parentNode.querySelector(".value");
          out.textContent = i == null ? "" : `step ${steps[i]}   ` + filled.map((one, n) => rows[n][i] == null ? "" : (filled.length > 1 ? one.label + " " : "") + figure(rows[n][i])).filter(Boolean).join("   ");
        }] },
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 26, values: (u, ticks) => ticks.map((t) => Number.isInteger(t) ? t : "") }, { ...axis, size: 46, values: (u, ticks) => ticks.map(figure) }],
        series: [{}, ...filled.map((one) => ({
          label: one.label, stroke: resolved(colour(one.index ?? 0)), width: 1.6, spanGaps: true,
          points: { show: !!one.dots || one.steps.length < 2, size: 5 },
        }))],
      }, [steps, ...rows], element);
    });
    return () => { stopped = true; plot?.destroy(); };
  }, [mark, height]);
  const last = filled.length === 1 ? filled[0].values.at(-1) : null;
  return html`<section class="panel ${width}"><h2>${title}${last == null ? "" : html` <span class="quiet">${figure(last)}${unit}</span>`}</h2>
    ${filled.length > 1 && html`<div class="legend">${filled.map((one) => html`<span><i style=${{ background: colour(one.index ?? 0) }}></i>${one.label} ${figure(one.values.at(-1))}</span>`)}</div>`}
    ${filled.length ? html`<div class="chart"><span class="value"></span><div ref=${place} style=${{ height: `${height}px` }} role="img" aria-label=${`${title}: ${filled.map((one) => `${one.label} ${figure(one.values.at(-1))}`).join(", ")}`}></div></div>`
      : html`<p class="quiet" ref=${place}>no data yet</p>`}</section>`;
}

/** A whole and its parts: [{label, value, index}] */
export function Parts({ parts, whole, write }) {
  return html`<div class="stack" role="img" aria-label=${parts.map((one) => `${one.label} ${write(one.value)}`).join(", ")}>
    ${parts.filter((one) => one.value > 0).map((one) => html`<i title=${`${one.label} ${write(one.value)}`} style=${{ width: `${100 * one.value / (whole || 1)}%`, background: one.colour || colour(one.index) }}></i>`)}</div>`;
}
