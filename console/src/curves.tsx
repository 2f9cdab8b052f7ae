// Metrics of one or several runs over each other, by step, time, policy version or samples.

import { useState } from "preact/hooks";
import type { Run, Series, Value } from "./answers";
import { query } from "./api";
import { Chart, type Line } from "./chart";
import { go, useAnswer, useKeys, type Address } from "./hooks";
import { Breakable, Problem } from "./texts";

const AXES: [string, string][] = [
  ["step", "train step"],
  ["time", "seconds since the run's first row"],
  ["version", "policy version"],
  ["samples", "trajectories trained"],
];
const SCALES = ["auto", "linear", "log"];
const FIRST = [
  "heldout/sampled",
  "heldout/greedy",
  "train/reward",
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
const WAITS = "who waits for whom: seconds of a train step"; // parts of one sum: never log
const BY_DEPTH = /^train\/by_depth\/(\d+)\/(\w+)$/;
const TRIAL = /^(.+\/trial_reward)\/(\d+)$/;
const UNITS: [RegExp, string][] = [
  [/tokens_per_s$/, "tokens/s"],
  [/_s$|^who waits/, "s"],
  [/_bytes$/, "bytes"],
  [/kl$|logprob_difference$|entropy$/, "nats"],
  [/tokens/, "tokens"],
  [/staleness/, "versions"],
];
const HELPS_FROM = 1000; // a log scale, where the largest value is so many times the smallest

type Props = { runs: Run[]; run: Run; address: Address; theme: string };

export function Curves({ runs, run, address, theme }: Props) {
  const { values } = address;
  const [words, setWords] = useState("");
  const chosen = values.getAll("run").filter((name) => runs.some((each) => each.name === name));
  const shown = chosen.length ? chosen : [run.name];
  const version = runs.map((each) => each.progress.num_bytes).join();
  const path = `runs/${encodeURIComponent(run.name)}/metrics`;
  const names = useAnswer<{ names: string[] }>(path, version).value?.names ?? [];
  const wanted = values.getAll("name");
  const picked = wanted.length ? wanted : firstOf(names);
  const axis = values.get("x") ?? "step";
  const scale = values.get("y") ?? "auto";
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
  const after = (all: string[], one: string) => all[(all.indexOf(one) + 1) % all.length];
  const axes = AXES.map(([name]) => name);
  const variants = variantsOf(runs.filter((each) => shown.includes(each.name)));
  const hasSeeds = Object.values(variants).some((each) => each.length > 1);
  const areTogether = hasSeeds && values.get("seeds") !== "apart";
  useKeys({
    x: () => set("x", [after(axes, axis)]),
    l: () => set("y", [after(SCALES, scale)]),
    "/": () => document.getElementById("search-metrics")?.focus(),
  });
  const found = names.filter((name) =>
    words.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word)),
  );
  const title = AXES.find(([name]) => name === axis)?.[1] ?? axis;
  return (
    <main class="with-side">
      <aside class="side" aria-label="What is shown">
        <Choice title="Runs">
          {runs.map((each) => (
            <Box
              name={each.name}
              isOn={shown.includes(each.name)}
              onChange={() => set("run", flip(shown, each.name))}
            />
          ))}
          {hasSeeds && (
            <Box
              name="seeds of one config as a band"
              isOn={areTogether}
              onChange={() => set("seeds", areTogether ? ["apart"] : [])}
            />
          )}
        </Choice>
        <Choice title="Over (x)">
          {AXES.map(([name, text]) => (
            <Box kind="axis" name={text} isOn={axis === name} onChange={() => set("x", [name])} />
          ))}
        </Choice>
        <Choice title="Scale (l)">
          {SCALES.map((name) => (
            <Box kind="scale" name={name} isOn={scale === name} onChange={() => set("y", [name])} />
          ))}
        </Choice>
        <Choice title={`Metrics: ${found.length} (/)`}>
          <input
            id="search-metrics"
            type="search"
            aria-label="Search in metrics"
            placeholder="Search"
            value={words}
            onInput={(event) => setWords(event.currentTarget.value)}
          />
          {groupsOf(found).map(([group, own]) => (
            <details key={group} open={words !== "" || own.some((name) => picked.includes(name))}>
              <summary>
                <Breakable text={group} /> <small>{own.length}</small>
              </summary>
              {own.map((name) => (
                <Box
                  name={name}
                  says={name.slice(group.length + 1)}
                  isOn={picked.includes(name)}
                  onChange={() => set("name", flip(picked, name))}
                />
              ))}
            </details>
          ))}
        </Choice>
      </aside>
      <div class="charts">
        {curves.error && <Problem text={curves.error.message} />}
        {names.length === 0 && <p>The run has no metrics yet.</p>}
        {[...new Set(picked.map(chartOf))].map((chart) => {
          const own = (curves.value?.series ?? []).filter((each) => chartOf(each.name) === chart);
          const all = areTogether ? together(own, axis, variants) : apart(own, axis, shown);
          return (
            <Chart
              key={chart}
              title={chart}
              x={title}
              unit={UNITS.find(([pattern]) => pattern.test(chart))?.[1]}
              isLog={isLog(all, scale, chart === WAITS)}
              lines={all}
              note={areTogether ? "lines: mean of the seeds; bands: from the least to the most" : ""}
              theme={theme}
            />
          );
        })}
      </div>
    </main>
  );
}

function Choice({ title, children }: { title: string; children: unknown }) {
  return (
    <fieldset>
      <legend>{title}</legend>
      {children as never}
    </fieldset>
  );
}

type BoxProps = { name: string; says?: string; kind?: string; isOn: boolean; onChange: () => void };

function Box({ name, says, kind, isOn, onChange }: BoxProps) {
  return (
    <label>
      <input type={kind ? "radio" : "checkbox"} name={kind} checked={isOn} onChange={onChange} />
      <span>
        <Breakable text={says ?? name} />
      </span>
    </label>
  );
}

function groupsOf(names: string[]): [string, string[]][] {
  const groups = new Map<string, string[]>();
  for (const name of names) {
    const group = name.slice(0, name.lastIndexOf("/"));
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  return [...groups];
}

/** Return what is shown before anybody chooses; the mismatch at each context depth has one chart. */
function firstOf(names: string[]): string[] {
  const depths = names
    .filter((name) => BY_DEPTH.exec(name)?.[2] === "mismatch_kl")
    .sort((a, b) => Number(BY_DEPTH.exec(a)?.[1]) - Number(BY_DEPTH.exec(b)?.[1]));
  const trials = names.filter((name) => name.startsWith("train/") && TRIAL.test(name));
  return [...FIRST.filter((name) => names.includes(name)), ...trials, ...depths];
}

/** Return the chart of a metric: what is to be compared with each other has one. */
function chartOf(name: string): string {
  if (name.startsWith("lengths/")) return "sampled tokens of a trajectory, mean";
  if (name in SECONDS) return WAITS;
  const depth = BY_DEPTH.exec(name);
  return depth ? `train/by_depth/${depth[2]}` : (TRIAL.exec(name)?.[1] ?? name);
}

/** Return what tells a metric from the others of its chart; "" where it is alone. */
function partOf(name: string): string {
  const depth = BY_DEPTH.exec(name);
  if (depth) return `from token ${depth[1]}`;
  const trial = TRIAL.exec(name);
  if (trial) return `episode ${trial[2]}`;
  return SECONDS[name] ?? (name.startsWith("lengths/") ? name.slice(8) : "");
}

function placesOf(each: Series, axis: string): (number | null)[] {
  if (axis === "time") return each.time.map((time) => time - (each.time[0] ?? 0));
  if (axis === "samples") return each.samples ?? each.train_step;
  return axis === "version" ? each.policy_version : each.train_step;
}

function apart(series: Series[], axis: string, runs: string[]): Line[] {
  const areSeveral = new Set(series.map((each) => each.name)).size > 1;
  return series.map((each, place) => {
    const words = [runs.length > 1 ? each.run : "", partOf(each.name)].filter(Boolean);
    return {
      label: `${words.join(", ") || each.run}${each.low ? ", 95 %" : ""}`,
      xs: placesOf(each, axis),
      ys: each.value,
      low: each.low,
      high: each.high,
      index: areSeveral ? place : runs.indexOf(each.run),
    };
  });
}

type Variants = Record<string, string[]>;

/** Return the runs by config: those of one differ in their seeds alone. */
function variantsOf(runs: Run[]): Variants {
  const variants: Variants = {};
  for (const run of runs) (variants[run.variant] ??= []).push(run.name);
  return variants;
}

/** Return for each config and metric the mean over its seeds, from the least to the most. */
function together(series: Series[], axis: string, variants: Variants): Line[] {
  const names = [...new Set(series.map((each) => each.name))];
  return Object.values(variants)
    .flatMap((runs) => names.map((name) => ({ runs, name })))
    .map(({ runs, name }, index) => {
      const at = new Map<number, number[]>();
      for (const each of series) {
        if (each.name !== name || !runs.includes(each.run)) continue;
        placesOf(each, axis).forEach((x, place) => {
          const value = each.value[place];
          if (x !== null && typeof value === "number") at.set(x, [...(at.get(x) ?? []), value]);
        });
      }
      const points = [...at].sort(([a], [b]) => a - b);
      const whose = runs.length > 1 ? `${runs[0]}, ${runs.length} seeds` : runs[0];
      return {
        label: [whose, partOf(name)].filter(Boolean).join(", "),
        xs: points.map(([x]) => x),
        ys: points.map(([, all]): Value => all.reduce((sum, one) => sum + one, 0) / all.length),
        low: runs.length > 1 ? points.map(([, all]) => Math.min(...all)) : null,
        high: runs.length > 1 ? points.map(([, all]) => Math.max(...all)) : null,
        index,
      };
    });
}

function isLog(lines: Line[], scale: string, isShared: boolean): boolean {
  const values = lines.flatMap((line) => line.ys).filter((value) => typeof value === "number");
  if (scale === "linear" || values.length === 0 || Math.min(...values) <= 0) return false;
  return scale === "log" || !isShared && Math.max(...values) / Math.min(...values) >= HELPS_FROM;
}
