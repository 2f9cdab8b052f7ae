// The list: filters, sorting and paging over all trajectories of a run.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Choices, Page, Run, Summary } from "./answers";
import { query } from "./api";
import { change, go, linkTo, useAnswer, useKeys, useMedia, type Address } from "./hooks";
import { number, plain, policy, Problem, Reward } from "./texts";

const PAGE = 50;
const MIN_TEXT = 3; // characters of a text search
const PAUSE_MS = 30; // after a key, until the list is asked for
const SELECTS: [string, string][] = [
  ["environment", "Environment"],
  ["outcome", "Outcome"],
  ["label", "Label"],
  ["stop_reason", "Stop reason"],
  ["owner", "Failure of"],
];
const RANGES: [string, string][] = [
  ["reward", "Reward"],
  ["staleness", "Staleness"],
  ["version", "Policy version"],
  ["length", "Sampled tokens"],
  ["tools", "Tool calls"],
  ["step", "Train step"],
];
const TEXTS: [string, string][] = [
  ["text", "Text search"],
  ["task_key", "Task"],
  ["trajectory_id", "Id begins with"],
  ["group_id", "Group"],
];
export const FILTERS = [...TEXTS, ...SELECTS, ...RANGES].map(([name]) => name);
const COLUMNS: [string, string][] = [
  ["number", "#"],
  ["", "task"],
  ["", "outcome"],
  ["train_step", "step"],
  ["reward", "reward"],
  ["advantage", "advantage"],
  ["", "policy"],
  ["staleness", "stale"],
  ["num_sampled", "tokens"],
  ["num_turns", "turns"],
  ["", "stop"],
  ["", "answer"],
];

const NO_MATCH = "No trajectory matches. Take a filter away (x clears all).";
const NOT_YET = "The run has no trajectory so far. Each appears here when it ends.";

export function Trajectories({ run, address }: { run: Run; address: Address }) {
  const { values } = address;
  const offset = Number(values.get("offset") ?? 0);
  const sort = values.get("sort") ?? "-number";
  const asked = FILTERS.map((name): [string, string] => [name, values.get(name) ?? ""]);
  const text = query([...asked, ["sort", sort], ["offset", `${offset}`], ["limit", `${PAGE}`]]);
  const base = `runs/${encodeURIComponent(run.name)}`;
  const indexed = run.progress.num_bytes;
  const page = useAnswer<Page>(`${base}/trajectories?${text}`, indexed);
  // After the list: it takes longer, and nobody chooses before.
  const choices = useAnswer<Choices>(
    page.value ? `${base}/choices` : null,
    run.progress.num_trajectories,
  );
  const [row, setRow] = useState(0);
  const table = useRef<HTMLTableElement>(null);
  const filters = useRef<HTMLDetailsElement>(null);
  const isNarrow = useMedia("(max-width: 44rem)"); // as style.css has it
  const numSet = asked.filter(([, value]) => value).length;
  const summaries = page.value?.summaries ?? [];
  const total = page.value?.total ?? 0;
  useEffect(() => setRow(0), [text]);
  const turn = (by: number) => {
    const next = offset + by * PAGE;
    if (next >= 0 && next < total) change({ offset: next ? `${next}` : "" });
  };
  const move = (by: number) => {
    const next = Math.max(0, Math.min(summaries.length - 1, row + by));
    setRow(next);
    table.current?.querySelectorAll("tbody tr")[next]?.scrollIntoView({ block: "nearest" });
  };
  useKeys({
    j: () => move(1),
    ArrowDown: () => move(1),
    k: () => move(-1),
    ArrowUp: () => move(-1),
    n: () => turn(1),
    p: () => turn(-1),
    x: () => go("trajectories", { run: run.name }),
    "/": () => {
      if (filters.current) filters.current.open = true;
      document.getElementById("filter-text")?.focus();
    },
    Enter: () => summaries[row] && open(run, summaries[row], values),
  });
  const sortBy = (name: string) => change({ sort: sort === `-${name}` ? name : `-${name}`, offset: "" });
  return (
    <main>
      <details class="fold" ref={filters} open={!isNarrow}>
        <summary>Filters{numSet > 0 && ` (${numSet} set)`}</summary>
        <form class="filters" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
          {TEXTS.map(([name, label]) => (
            <Field
              name={name}
              label={label}
              value={values.get(name) ?? ""}
              hint={name === "text" ? `${MIN_TEXT} characters or more` : ""}
            />
          ))}
          {SELECTS.map(([name, label]) => (
            <label>
              {label}
              <select
                id={`filter-${name}`}
                value={values.get(name) ?? ""}
                onChange={(event) => change({ [name]: event.currentTarget.value, offset: "" })}
              >
                <option value="">all</option>
                {name === "owner" && <option value="ANY">anybody</option>}
                {(choices.value?.[name] ?? []).map((choice) => (
                  <option value={choice}>{choice}</option>
                ))}
              </select>
            </label>
          ))}
          {RANGES.map(([name, label]) => (
            <Field name={name} label={label} value={values.get(name) ?? ""} hint="1, 0.5:, :2, 1:4" />
          ))}
          <a class="button" href={linkTo("trajectories", { run: run.name })}>
            Clear filters
          </a>
        </form>
      </details>
      {page.error && <Problem text={page.error.message} />}
      <p class="count" aria-live="polite">
        <span>
          <span id="total">{total.toLocaleString("en")}</span> of{" "}
          {run.progress.num_trajectories.toLocaleString("en")} trajectories
          {total > 0 && `, ${offset + 1} to ${offset + summaries.length}`}
        </span>
        <button type="button" onClick={() => turn(-1)} disabled={offset === 0}>
          Previous
        </button>
        <button type="button" onClick={() => turn(1)} disabled={offset + PAGE >= total}>
          Next
        </button>
      </p>
      <div class="scroll" tabIndex={0} role="group" aria-label="Trajectories">
        <table ref={table} class="list" aria-busy={page.isLoading}>
          <thead>
            <tr>
              {COLUMNS.map(([name, title]) => (
                <th aria-sort={sortOf(sort, name)}>
                  {name ? (
                    <button
                      type="button"
                      onClick={(event) => {
                        // After a click by pointer, Enter opens the row and does not sort again.
                        if (event.detail > 0) event.currentTarget.blur();
                        sortBy(name);
                      }}
                    >
                      {title}
                      {sort === name ? " ↑" : sort === `-${name}` ? " ↓" : ""}
                    </button>
                  ) : (
                    title
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {summaries.map((summary, index) => (
              <tr
                key={summary.number}
                class={index === row ? "chosen" : ""}
                aria-current={index === row ? "true" : undefined}
                onClick={() => open(run, summary, values)}
              >
                <td>
                  <a href={linkOf(run, summary, values)}>{summary.number}</a>
                </td>
                <td class="short">{plain(summary.task_key)}</td>
                <td>
                  {summary.outcome}
                  {summary.label && summary.label !== "training" ? `, ${summary.label}` : ""}
                  {summary.owners.length > 0 && (
                    <span class="failure"> {summary.owners.join(" ")} failed</span>
                  )}
                </td>
                <td data-name="step">{summary.train_step}</td>
                <td>
                  <Reward value={summary.reward} />
                </td>
                <td data-name="advantage">{number(summary.advantage)}</td>
                <td data-name="policy">{policy(summary)}</td>
                <td data-name="stale">{number(summary.staleness)}</td>
                <td data-name="tokens">{number(summary.num_sampled)}</td>
                <td data-name="turns">{summary.num_turns}</td>
                <td>{summary.stop_reasons.join(" ")}</td>
                <td class="preview">{plain(summary.preview)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {page.value && total === 0 && <p>{numSet > 0 ? NO_MATCH : NOT_YET}</p>}
    </main>
  );
}

function Field(props: { name: string; label: string; value: string; hint: string }) {
  const timer = useRef<number>(0);
  // What is being typed stays when the list of the letters before is drawn meanwhile.
  const [draft, setDraft] = useState(props.value);
  const asked = useRef(props.value);
  useEffect(() => {
    if (props.value !== asked.current) setDraft(props.value);
    asked.current = props.value;
  }, [props.value]);
  const set = (typed: string) => {
    const value = props.name === "text" && typed.length < MIN_TEXT ? "" : typed;
    clearTimeout(timer.current);
    asked.current = value;
    if (value !== props.value) change({ [props.name]: value, offset: "" }, true);
  };
  return (
    <label>
      {props.label}
      <input
        id={`filter-${props.name}`}
        value={draft}
        placeholder={props.hint}
        spellcheck={false}
        autocomplete="off"
        onInput={(event) => {
          const { value } = event.currentTarget;
          setDraft(value);
          clearTimeout(timer.current);
          timer.current = setTimeout(() => set(value), PAUSE_MS);
        }}
        onChange={(event) => set(event.currentTarget.value)}
      />
    </label>
  );
}

function sortOf(sort: string, name: string): "ascending" | "descending" | "none" | undefined {
  if (!name) return undefined;
  return sort === name ? "ascending" : sort === `-${name}` ? "descending" : "none";
}

function linkOf(run: Run, summary: Summary, values: URLSearchParams): string {
  const list = new URLSearchParams(values);
  list.delete("run");
  const back = list.toString();
  return linkTo("trajectory", {
    run: run.name,
    number: `${summary.number}`,
    ...(back && { list: back }),
  });
}

function open(run: Run, summary: Summary, values: URLSearchParams): void {
  location.hash = linkOf(run, summary, values);
}
