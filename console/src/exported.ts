// The answers of an export: what the console's routes would answer, from script files beside the
// page. A page that is opened from a disk may load scripts and nothing else.

import { Refusal, type Page, type Run, type Series, type Summary, type Tokens } from "./answers";

type Kind = "summaries" | "texts" | "rows";
type Exported = Run & {
  folder: string;
  fields: string[];
  parts: Record<Kind, number[]>; // the number of the trajectory with which each part begins
  overview: unknown;
  choices: unknown;
  metrics: string[];
  publishes: unknown;
  config: Record<string, string>;
};
type Head = { format: number; time: number; runs: Exported[] };
type Row = { trajectory: Record<string, unknown>; tokens: Tokens[]; forks: unknown[] };
type Series1 = Omit<Series, "run">;

declare global {
  interface Window {
    dialoopExport?: string;
    dialoopPart?: (name: string, packed: string) => void;
  }
}

const FORMAT = 1;
const MAX_GROUP = 64;
const MAX_LIMIT = 500;
const MIN_TEXT = 3;
const KEPT_PARTS = 64;

export function isExport(): boolean {
  return window.dialoopExport !== undefined;
}

async function unpack(packed: string): Promise<unknown> {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

let head: Promise<Head> | null = null;

export function readHead(): Promise<Head> {
  head ??= unpack(window.dialoopExport!).then((value) => {
    const read = value as Head;
    if (read.format === FORMAT) return read;
    throw new Refusal(0, `This page reads exports of format ${FORMAT}, not ${read.format}.`);
  });
  return head;
}

const parts = new Map<string, Promise<unknown>>();
const waiting = new Map<string, (packed: string) => void>();
window.dialoopPart = (name, packed) => waiting.get(name)?.(packed);

function load<T>(name: string): Promise<T> {
  const kept = parts.get(name) ?? fetchPart(name);
  parts.delete(name); // the newest goes last
  parts.set(name, kept);
  if (parts.size > KEPT_PARTS) parts.delete(parts.keys().next().value as string);
  return kept as Promise<T>;
}

function fetchPart(name: string): Promise<unknown> {
  return new Promise<string>((resolve, reject) => {
    // A report has its parts in the page itself.
    const inside = document.querySelector(`script[data-part="${name}"]`);
    if (inside) return resolve(inside.textContent ?? "");
    const script = document.createElement("script");
    waiting.set(name, resolve);
    script.onload = () => script.remove();
    script.onerror = () => {
      parts.delete(name);
      reject(new Refusal(404, `The export lacks its file data/${name}.js. Export the run again.`));
    };
    script.src = `data/${name}.js`;
    document.head.append(script);
  })
    .then(unpack)
    .finally(() => waiting.delete(name));
}

async function all<T>(run: Exported, kind: Kind): Promise<T[]> {
  const lists = run.parts[kind].map((_, part) => load<T[]>(`${run.folder}${kind}-${part}`));
  return (await Promise.all(lists)).flat();
}

const listed = new Map<Exported, Promise<Summary[]>>();

function summariesOf(run: Exported): Promise<Summary[]> {
  if (!listed.has(run)) {
    const made = all<unknown[]>(run, "summaries").then((rows) =>
      rows.map(
        (row) =>
          Object.fromEntries(run.fields.map((name, place) => [name, row[place]])) as Summary,
      ),
    );
    made.catch(() => listed.delete(run));
    listed.set(run, made);
  }
  return listed.get(run)!;
}

/** Return where a trajectory stands among those of the run. */
async function placeOf(run: Exported, text: string): Promise<number> {
  const place = (await summariesOf(run)).findIndex((each) => `${each.number}` === text);
  if (place < 0) throw new Refusal(404, `The run has no trajectory number ${text}.`);
  return place;
}

async function rowAt(run: Exported, place: number): Promise<Row> {
  const summaries = await summariesOf(run);
  const { number } = summaries[place];
  const firsts = run.parts.rows;
  const after = firsts.findIndex((first) => first > number);
  const part = (after < 0 ? firsts.length : after) - 1;
  const begin = summaries.findIndex((each) => each.number === firsts[part]);
  return (await load<Row[]>(`${run.folder}rows-${part}`))[place - begin];
}

// -- filters, as dialoop_ops.runs.filters has them

const EXACT = ["environment", "outcome", "label", "task_key", "group_id"] as const;
const SORTS = [
  ...(["number", "reward", "advantage", "staleness"] as const),
  ...(["num_sampled", "num_turns", "train_step"] as const),
];
const RANGES = {
  reward: ["reward", "reward"],
  staleness: ["staleness", "staleness"],
  step: ["train_step", "train_step"],
  version: ["oldest", "newest"],
  length: ["num_sampled", "num_sampled"],
  tools: ["num_tool_calls", "num_tool_calls"],
} as const;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

type Ends = [number | null, number | null];

function rangeOf(name: string, text: string): Ends {
  const [low, ...rest] = text.split(":");
  const ends = [low, rest.length ? rest.join(":") : low].map((end) => end.trim());
  if (ends.some((end) => end !== "" && !NUMBER.test(end))) {
    const remedy = 'Give a number or a range: "3", "0.5:", ":2" or "1:4".';
    throw new Refusal(400, `${name} is '${text.slice(0, 40)}'. ${remedy}`);
  }
  return ends.map((end) => (end === "" ? null : Number(end))) as Ends;
}

function meets([low, high]: Ends, first: number | null, last: number | null): boolean {
  if (low === null && high === null) return true;
  if (first === null || last === null) return false;
  return (low === null || last >= low) && (high === null || first <= high);
}

async function matching(run: Exported, values: URLSearchParams): Promise<Summary[]> {
  const asked = (name: string) => values.get(name) ?? "";
  const ranges = Object.entries(RANGES)
    .filter(([name]) => asked(name) !== "")
    .map(([name, columns]) => [rangeOf(name, asked(name)), ...columns] as const);
  const text = asked("text").toLowerCase();
  if (text !== "" && text.length < MIN_TEXT) {
    throw new Refusal(400, `text is '${text}'. Search for ${MIN_TEXT} characters or more.`);
  }
  const summaries = await summariesOf(run);
  const texts = text === "" ? [] : await all<string>(run, "texts");
  const owner = asked("owner");
  return summaries.filter(
    (each, place) =>
      each.trajectory_id.startsWith(asked("trajectory_id")) &&
      EXACT.every((name) => ["", each[name]].includes(asked(name))) &&
      (asked("stop_reason") === "" || each.stop_reasons.includes(asked("stop_reason"))) &&
      (owner === "" || (owner === "ANY" ? each.owners.length > 0 : each.owners.includes(owner))) &&
      ranges.every(([ends, first, last]) => meets(ends, each[first], each[last])) &&
      (text === "" || texts[place].toLowerCase().includes(text)),
  );
}

function sorted(summaries: Summary[], sort: string): Summary[] {
  const sign = sort.startsWith("-") ? -1 : 1;
  const column = SORTS.find((name) => name === sort.replace(/^-/, ""));
  if (!column) throw new Refusal(404, `There is no column '${sort.slice(0, 40)}' to sort by.`);
  return summaries.sort((a, b) => {
    const [x, y] = [a[column], b[column]];
    if (x === y) return sign * (a.number - b.number);
    if (x === null || y === null) return x === null ? 1 : -1; // numbers that are missing go last
    return sign * (x - y);
  });
}

// -- routes

async function page(run: Exported, values: URLSearchParams): Promise<Page> {
  const summaries = sorted([...(await matching(run, values))], values.get("sort") ?? "-number");
  const offset = Number(values.get("offset") ?? 0);
  const limit = Math.min(MAX_LIMIT, Number(values.get("limit") ?? 50));
  return { total: summaries.length, summaries: summaries.slice(offset, offset + limit) };
}

async function group(run: Exported, place: number): Promise<unknown> {
  const summaries = await summariesOf(run);
  const own = summaries[place];
  const places = summaries.flatMap((each, index) => {
    const isMember = own.group_id
      ? each.group_id === own.group_id && each.train_step === own.train_step
      : each.trajectory_id.startsWith(own.trajectory_id);
    return isMember ? [index] : [];
  });
  const members = places.slice(0, MAX_GROUP).map(async (index) => {
    const { messages = [], turns = [], failures = [] } = (await rowAt(run, index)).trajectory;
    return { summary: summaries[index], messages, turns, failures };
  });
  return { total: places.length, members: await Promise.all(members) };
}

async function tokens(run: Exported, place: number, values: URLSearchParams): Promise<Tokens> {
  const row = await rowAt(run, place);
  const sequence = Number(values.get("sequence") ?? 0);
  const whole = row.tokens[sequence];
  if (!whole) {
    throw new Refusal(404, `The trajectory has ${row.tokens.length} sequences, not ${sequence}.`);
  }
  const start = Number(values.get("start") ?? 0);
  if (!(start >= 0 && start <= whole.num_tokens)) {
    throw new Refusal(404, `Sequence ${sequence} has no token ${start}.`);
  }
  const end = start + Number(values.get("limit") ?? whole.num_tokens);
  const cut = Object.entries(whole).map(([name, value]) => [
    name,
    Array.isArray(value) ? value.slice(start, end) : value,
  ]);
  return { ...Object.fromEntries(cut), start };
}

async function curves(runs: Exported[], names: string[]): Promise<unknown> {
  const series = runs.map(async (run) => {
    const own = await load<Series1[]>(`${run.folder}curves`);
    const none = { time: [], train_step: [], policy_version: [], samples: [], value: [] };
    return names.map((name) => ({
      run: run.name,
      ...(own.find((each) => each.name === name) ?? { name, ...none, low: null, high: null }),
    }));
  });
  return { series: (await Promise.all(series)).flat() };
}

function config(runs: Exported[]): unknown {
  const keys = new Set(runs.flatMap((run) => Object.keys(run.config)));
  const lines = [...keys].map((key) => {
    const values = runs.map((run) => run.config[key] ?? "-");
    return { key, values, differs: new Set(values).size > 1 };
  });
  return { runs: runs.map((run) => run.name), lines };
}

async function ofTrajectory(run: Exported, words: string[], values: URLSearchParams) {
  const place = await placeOf(run, words[0]);
  if (words[1] === "tokens") return tokens(run, place, values);
  if (words[1] === "group") return group(run, place);
  const row = await rowAt(run, place);
  if (words[1] === "forks") return { branches: row.forks };
  return { summary: (await summariesOf(run))[place], ...row.trajectory };
}

/** Answer a path as the console's service would. */
export async function answerOf(path: string): Promise<unknown> {
  const [place, text] = path.split("?");
  const values = new URLSearchParams(text ?? "");
  const [first, name, what, ...words] = place.split("/").map(decodeURIComponent);
  const read = await readHead();
  const find = (each: string) => {
    const run = read.runs.find((one) => one.name === each);
    if (!run) throw new Refusal(404, `There is no run '${each.slice(0, 80)}' in this export.`);
    return run;
  };
  if (first === "curves") return curves(values.getAll("run").map(find), values.getAll("name"));
  if (first === "config") return config(values.getAll("run").map(find));
  if (name === undefined) return { runs: read.runs };
  const run = find(name);
  if (what === "overview") return run.overview;
  if (what === "choices") return run.choices;
  if (what === "metrics") return { names: run.metrics };
  if (what === "publishes") return run.publishes;
  if (what === "trajectories" && words.length === 0) return page(run, values);
  if (what === "trajectories") return ofTrajectory(run, words, values);
  throw new Refusal(404, "An export has no running stack.");
}
