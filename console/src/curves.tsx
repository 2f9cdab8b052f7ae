// Metrics of one or several runs over each other, by step, time, policy version or samples.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Run, Series, Value } from "./answers";
import { query } from "./api";
import { go, useAnswer, useKeys, type Address } from "./hooks";
import { number, Problem } from "./texts";

const AXES: [string, string][] = [
  ["step", "train step"],
  ["time", "time since the run's first row"],
  ["version", "policy version"],
  ["samples", "trajectories trained"],
];
const FIRST = [
  "train/reward",
  "evaluation/running/mean_reward",
  "train/lease_s",
  "train/train_s",
  "train/wait_s",
  "train/group_play_s",
  "train/pipeline_depth",
  "train/staleness_mean",
  "train/fresh_mismatch_kl",
  "train/entropy",
  "lengths/generated",
  "lengths/trained",
  "throughput/trained_tokens_per_s",
];
const SECONDS: Record<string, string> = {
  "train/lease_s": "waited for groups",
  "train/train_s": "computed",
  "train/wait_s": "waited for the publish before",
  "train/group_play_s": "a group's play",
};
const BY_DEPTH = /^train\/by_depth\/(\d+)\/(\w+)$/;
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
// Lines differ in their dashes as well, so that no colour has to be told from another.
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 5]];

type Props = { runs: Run[]; run: Run; address: Address; theme: string };

export function Curves({ runs, run, address, theme }: Props) {
  const { values } = address;
  const chosen = values.getAll("run").filter((name) => runs.some((each) => each.name === name));
  const shown = chosen.length ? chosen : [run.name];
  const version = runs.map((each) => each.progress.num_bytes).join();
  const path = `runs/${encodeURIComponent(run.name)}/metrics`;
  const names = useAnswer<{ names: string[] }>(path, version).value?.names ?? [];
  const wanted = values.getAll("name");
  const picked = wanted.length ? wanted : firstOf(names);
  const axis = values.get("x") ?? "step";
  const asked = query([
    ...shown.map((name): [string, string] => ["run", name]),
    ...picked.map((name): [string, string] => ["name", name]),
    ["x", axis],
  ]);
  const curves = useAnswer<{ series: Series[] }>(picked.length ? `curves?${asked}` : null, version);
  const set = (name: string, all: string[]) => {
    const next = new URLSearchParams(values);
    next.delete(name);
    for (const each of all) next.append(name, each);
    go("curves", next);
  };
  const flip = (all: string[], name: string) =>
    all.includes(name) ? all.filter((each) => each !== name) : [...all, name];
  const nextAxis = () => {
    const place = AXES.findIndex(([name]) => name === axis);
    set("x", [AXES[(place + 1) % AXES.length][0]]);
  };
  useKeys({ x: nextAxis, "/": () => document.getElementById("series-0")?.focus() });
  return (
    <main class="with-side">
      <aside class="side">
        <fieldset>
          <legend>Runs</legend>
          {runs.map((each) => (
            <label>
              <input
                type="checkbox"
                checked={shown.includes(each.name)}
                onChange={() => set("run", flip(shown, each.name))}
              />
              {each.name}
            </label>
          ))}
        </fieldset>
        <fieldset>
          <legend>Over (x)</legend>
          {AXES.map(([name, title]) => (
            <label>
              <input
                type="radio"
                name="axis"
                checked={axis === name}
                onChange={() => set("x", [name])}
              />
              {title}
            </label>
          ))}
        </fieldset>
        <fieldset>
          <legend>Metrics (/)</legend>
          {names.map((name, index) => (
            <label>
              <input
                id={`series-${index}`}
                type="checkbox"
                checked={picked.includes(name)}
                onChange={() => set("name", flip(picked, name))}
              />
              {name}
            </label>
          ))}
        </fieldset>
      </aside>
      <div class="charts">
        {curves.error && <Problem text={curves.error.message} />}
        {names.length === 0 && <p>The run has no metrics yet.</p>}
        {[...new Set(picked.map(chartOf))].map((chart) => (
          <Chart
            key={chart}
            name={chart}
            axis={axis}
            theme={theme}
            runs={shown}
            series={(curves.value?.series ?? []).filter((each) => chartOf(each.name) === chart)}
          />
        ))}
      </div>
    </main>
  );
}

/** Return what is shown before anybody chooses; the mismatch at each context depth has one chart. */
function firstOf(names: string[]): string[] {
  const depths = names
    .filter((name) => BY_DEPTH.exec(name)?.[2] === "mismatch_kl")
    .sort((a, b) => Number(BY_DEPTH.exec(a)?.[1]) - Number(BY_DEPTH.exec(b)?.[1]));
  return [...FIRST.filter((name) => names.includes(name)), ...depths];
}

/** Return the chart of a metric: what is to be compared with each other has one. */
function chartOf(name: string): string {
  if (name.startsWith("lengths/")) return "sampled tokens of a trajectory, mean";
  if (name in SECONDS) return "who waits for whom: seconds of a train step";
  const depth = BY_DEPTH.exec(name);
  return depth ? `train/by_depth/${depth[2]}` : name;
}

/** Return what tells a line from the others of its chart. */
function labelOf(each: Series): string {
  const depth = BY_DEPTH.exec(each.name);
  if (depth) return `${each.run}, from token ${depth[1]}`;
  if (each.name in SECONDS) return `${each.run}, ${SECONDS[each.name]}`;
  return each.name.startsWith("lengths/") ? `${each.run}, ${each.name.slice(8)}` : each.run;
}

type ChartProps = { name: string; axis: string; theme: string; runs: string[]; series: Series[] };

function Chart({ name, axis, theme, runs, series }: ChartProps) {
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = place.current;
    if (!element || series.every((each) => each.value.length === 0)) return;
    const banded = series.filter((each) => each.low && each.high);
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const ticks: uPlot.Axis = {
      stroke: ink,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line },
      values: (_, splits) => splits.map((value) => number(value, 3)),
    };
    const several = new Set(series.map((each) => each.name)).size > 1;
    const placeOf = (each: Series) => (several ? series.indexOf(each) : runs.indexOf(each.run));
    const chart = new uPlot(
      {
        width: element.clientWidth || 600,
        height: 240,
        scales: { x: { time: false } },
        axes: [ticks, { ...ticks, size: 70 }],
        series: [
          { label: AXES.find(([each]) => each === axis)?.[1] ?? axis },
          ...series.map((each) => {
            const index = placeOf(each);
            return {
              label: labelOf(each),
              stroke: COLOURS[index % COLOURS.length],
              dash: DASHES[index % DASHES.length],
              width: 2,
              value: (_: uPlot, value: number | null) => number(value, 5),
              spanGaps: true,
              points: { show: each.value.length < 60 },
            };
          }),
          ...banded.flatMap((each) =>
            ["to", "from"].map((end) => ({
              label: `${each.run}, 95 % ${end}`,
              stroke: COLOURS[runs.indexOf(each.run) % COLOURS.length],
              width: 0.5,
              spanGaps: true,
              points: { show: false },
              value: (_: uPlot, value: number | null) => number(value, 3),
            })),
          ),
        ],
        bands: banded.map((each, place) => {
          const first = 1 + series.length + 2 * place;
          const fill = `${COLOURS[runs.indexOf(each.run) % COLOURS.length]}33`;
          return { series: [first, first + 1] as [number, number], fill };
        }),
      },
      joined(series, banded, axis),
      element,
    );
    const resize = new ResizeObserver(() =>
      chart.setSize({ width: element.clientWidth, height: 240 }),
    );
    resize.observe(element);
    return () => {
      resize.disconnect();
      chart.destroy();
    };
  }, [series, axis, theme, runs.join()]);
  return (
    <section class="chart" aria-label={name}>
      <h2>{name}</h2>
      <p class="last">
        {series
          .filter((each) => each.value.length)
          .map((each) => `${labelOf(each)}: ${number(each.value[each.value.length - 1])}`)
          .join(", ") || "no values"}
      </p>
      <div ref={place} />
    </section>
  );
}

/** Return uPlot's columns: all x in order, each run's values there, then each band's two ends. */
function joined(series: Series[], banded: Series[], axis: string): uPlot.AlignedData {
  const places = (each: Series): (number | null)[] => {
    if (axis === "time") return each.time.map((time) => time - (each.time[0] ?? 0));
    if (axis === "samples") return each.samples ?? each.train_step;
    return axis === "version" ? each.policy_version : each.train_step;
  };
  // Of equal x the last counts.
  const map = (each: Series, values: Value[]) =>
    new Map(places(each).map((x, index) => [x, values[index]]));
  const maps = [
    ...series.map((each) => map(each, each.value)),
    ...banded.flatMap((each) => [map(each, each.high ?? []), map(each, each.low ?? [])]),
  ];
  const all = new Set(maps.flatMap((map) => [...map.keys()]));
  const xs = [...all].filter((x): x is number => x !== null).sort((a, b) => a - b);
  const columns = maps.map((map) =>
    xs.map((x) => {
      const value = map.get(x);
      return typeof value === "number" ? value : null;
    }),
  );
  return [xs, ...columns];
}
