// The heat map of a sequence's tokens, and the numbers of the one that is pointed at.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Tokens, Value } from "./answers";
import { query } from "./api";
import { change, useAnswer, useKeys, type Address } from "./hooks";
import { number, plain, visible } from "./texts";

const PAGE = 2000;
const MODES: [string, string][] = [
  ["", "none"],
  ["logprob", "log-prob"],
  ["difference", "log ratio"],
  ["advantage", "advantage"],
  ["mask", "trained"],
  ["version", "policy version"],
  ["source", "who wrote it"],
];
// Okabe and Ito's colours, which people with any colour vision tell apart.
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const SOURCES = ["MODEL", "PROMPT", "TOOL", "ENVIRONMENT", "TEMPLATE"];

export type TokenState = {
  value: Tokens | null;
  error: string;
  start: number;
  pinned: number | null;
  shown: number | null; // the token whose numbers are shown
  pin: (token: number) => void;
  hover: (token: number | null) => void;
  page: (to: number) => void;
};

/** The tokens of the chosen sequence around the chosen token, and the keys that move in them. */
export function useTokens(path: string, address: Address, numSequences: number): TokenState {
  const { values } = address;
  const sequence = values.get("sequence") ?? "0";
  const linked = values.get("token");
  const start = Number(values.get("start") ?? Math.floor(Number(linked ?? 0) / PAGE) * PAGE);
  const asked = query([
    ["sequence", sequence],
    ["start", `${start}`],
    ["limit", `${PAGE}`],
  ]);
  const { value, error } = useAnswer<Tokens>(`${path}/tokens?${asked}`);
  const [hovered, hover] = useState<number | null>(null);
  const pinned = linked === null ? null : Number(linked);
  const last = (value?.num_tokens ?? 1) - 1;
  const pin = (token: number) => change({ token: `${Math.max(0, Math.min(last, token))}` }, true);
  const mode = values.get("by") ?? "";
  const byMode = (by: number) => {
    const place = MODES.findIndex(([name]) => name === mode);
    change({ by: MODES[(place + by + MODES.length) % MODES.length][0] }, true);
  };
  const page = (to: number) => change({ start: `${Math.max(0, to)}`, token: `${Math.max(0, to)}` });
  useKeys({
    ArrowRight: () => pin(pinned === null ? start : pinned + 1),
    ArrowLeft: () => pin(pinned === null ? start : pinned - 1),
    m: () => byMode(1),
    M: () => byMode(-1),
    s: () => change({ sequence: `${(Number(sequence) + 1) % numSequences}`, start: "", token: "" }),
    n: () => start + PAGE <= last && page(start + PAGE),
    p: () => start > 0 && page(start - PAGE),
  });
  useEffect(() => {
    const outside = pinned !== null && (pinned < start || pinned >= start + PAGE);
    if (outside) change({ start: `${Math.floor(pinned / PAGE) * PAGE}` }, true);
  }, [pinned, start]);
  const shown = hovered ?? pinned;
  return { value, error: error?.message ?? "", start, pinned, shown, pin, hover, page };
}

type ChoiceProps = {
  sequences: { num_tokens: number; fork_cause: string; advantage: unknown }[];
  address: Address;
};

export function ColourChoice({ sequences, address }: ChoiceProps) {
  const { values } = address;
  const mode = values.get("by") ?? "";
  return (
    <>
      <div class="controls" role="radiogroup" aria-label="Colour tokens by">
        Colour by
        {MODES.map(([name, title]) => (
          <button
            type="button"
            role="radio"
            aria-checked={mode === name}
            class={mode === name ? "chosen" : ""}
            onClick={() => change({ by: name }, true)}
          >
            {title}
          </button>
        ))}
      </div>
      {sequences.length > 1 && (
        <label>
          Sequence{" "}
          <select
            value={values.get("sequence") ?? "0"}
            onChange={(event) =>
              change({ sequence: event.currentTarget.value, start: "", token: "" })
            }
          >
            {sequences.map((each, index) => (
              <option value={`${index}`}>
                {index}: {each.num_tokens} tokens, {each.fork_cause.toLowerCase()}
              </option>
            ))}
          </select>
        </label>
      )}
    </>
  );
}

type MapProps = { tokens: Tokens; state: TokenState; address: Address };

/** All tokens of the sequence as the model saw them, coloured by log-prob unless otherwise asked. */
export function TokenMap({ tokens, state, address }: MapProps) {
  const { start, pinned, pin, hover, page } = state;
  const mode = address.values.get("by") || "logprob";
  const map = useRef<HTMLDivElement>(null);
  const last = tokens.num_tokens - 1;
  useEffect(() => {
    if (pinned !== null) {
      map.current?.querySelector(`[data-token="${pinned}"]`)?.scrollIntoView({ block: "nearest" });
    }
  }, [pinned, tokens]);
  const tokenAt = (event: Event) => {
    const { token } = (event.target as HTMLElement).dataset;
    return token === undefined ? null : Number(token);
  };
  return (
    <section class="card all-tokens" aria-label="Tokens">
      <h2>
        Tokens as the model saw them <small>by {MODES.find(([name]) => name === mode)?.[1]}</small>
      </h2>
      <Legend tokens={tokens} mode={mode} />
      <div
        ref={map}
        class="tokens"
        tabIndex={0}
        role="group"
        aria-label="All tokens"
        onPointerOver={(event) => hover(tokenAt(event))}
        onPointerLeave={() => hover(null)}
        onClick={(event) => {
          const token = tokenAt(event);
          if (token !== null) pin(token);
        }}
      >
        <Spans tokens={tokens} mode={mode} pinned={pinned} />
      </div>
      {last >= PAGE && (
        <p>
          Tokens {start} to {Math.min(start + PAGE, last + 1) - 1} of {last + 1}{" "}
          <button type="button" disabled={start === 0} onClick={() => page(start - PAGE)}>
            Previous
          </button>
          <button type="button" disabled={start + PAGE > last} onClick={() => page(start + PAGE)}>
            Next
          </button>
        </p>
      )}
    </section>
  );
}

type SpansProps = { tokens: Tokens; mode: string; pinned: number | null; places?: number[] };

/** Tokens with the colours of a mode; `places`: some of them, as text to read. */
export function Spans({ tokens, mode, pinned, places }: SpansProps) {
  const colour = colours(tokens, mode);
  return (
    <>
      {(places ?? tokens.ids.map((_, index) => index)).map((index) => {
        const place = tokens.start + index;
        const classes = [
          tokens.sources[index] === "MODEL" ? "sampled" : "given",
          tokens.special[index] ? "special" : "",
          place === pinned ? "pinned" : "",
        ];
        const text = tokens.texts ? tokens.texts[index] : `${tokens.ids[index]} `;
        return (
          <span
            data-token={places ? undefined : place}
            title={places ? number(numbersOf(tokens, mode)[index]) : undefined}
            class={classes.filter(Boolean).join(" ")}
            style={{ backgroundColor: colour(index) }}
          >
            {places ? plain(text) : visible(text) || "∅"}
          </span>
        );
      })}
    </>
  );
}

function finite(values: Value[]): number[] {
  return values.filter((value): value is number => typeof value === "number");
}

function difference(tokens: Tokens, index: number): Value {
  const [trainer, engine] = [tokens.trainer_logprobs[index], tokens.logprobs[index]];
  return typeof trainer === "number" && typeof engine === "number" ? trainer - engine : null;
}

function numbersOf(tokens: Tokens, mode: string): Value[] {
  if (mode === "logprob") return tokens.logprobs;
  if (mode === "advantage") return tokens.advantages;
  return tokens.ids.map((_, index) => difference(tokens, index));
}

function names(tokens: Tokens, mode: string): (string | null)[] {
  if (mode === "source") return tokens.sources;
  if (mode === "version") return tokens.versions;
  return tokens.ids.map((_, index) =>
    tokens.versions[index] === null ? null : tokens.trained[index] ? "trained" : "not trained",
  );
}

function palette(tokens: Tokens, mode: string): string[] {
  if (mode === "source") return SOURCES;
  if (mode === "mask") return ["trained", "not trained"];
  return [...new Set(tokens.versions.filter((version) => version !== null))] as string[];
}

/** Return the background of each token. Values off the scale's ends have its full colour. */
function colours(tokens: Tokens, mode: string): (index: number) => string | undefined {
  if (["mask", "version", "source"].includes(mode)) {
    const all = palette(tokens, mode);
    const each = names(tokens, mode);
    return (index) => {
      const place = each[index] === null ? -1 : all.indexOf(each[index] as string);
      return place < 0 ? undefined : `${PALETTE[place % PALETTE.length]}66`;
    };
  }
  const values = numbersOf(tokens, mode);
  const scale = scaleOf(values, mode);
  return (index) => {
    const value = values[index];
    if (value === null) return undefined;
    if (typeof value === "string") return "#d55e00"; // not finite: never to be overlooked
    const share = Math.min(1, Math.abs(value) / scale);
    const base = mode === "logprob" || value < 0 ? "--hot" : "--cold";
    return `color-mix(in srgb, var(${base}) ${(75 * share).toFixed(1)}%, transparent)`;
  };
}

function scaleOf(values: Value[], mode: string): number {
  const largest = Math.max(1e-9, ...finite(values).map(Math.abs));
  return mode === "logprob" ? Math.min(5, Math.max(0.5, largest)) : largest;
}

function Legend({ tokens, mode }: { tokens: Tokens; mode: string }) {
  if (["mask", "version", "source"].includes(mode)) {
    const used = new Set(names(tokens, mode));
    return (
      <p class="scale-legend">
        {palette(tokens, mode).map(
          (name, index) =>
            used.has(name) && (
              <span>
                <i style={{ backgroundColor: `${PALETTE[index % PALETTE.length]}66` }} />
                {name.toLowerCase()}
              </span>
            ),
        )}
      </p>
    );
  }
  const values = numbersOf(tokens, mode);
  if (finite(values).length === 0) {
    return <p class="scale-legend">{MISSING[mode] ?? "No token of this page has one."}</p>;
  }
  const scale = number(scaleOf(values, mode), 2);
  const ends = mode === "logprob" ? [`−${scale} or less`, "0"] : [`−${scale}`, `+${scale}`];
  return (
    <p class="scale-legend">
      {ends[0]} <i class={`scale ${mode === "logprob" ? "one" : "two"}`} /> {ends[1]}
    </p>
  );
}

const MISSING: Record<string, string> = {
  difference:
    "The run has no log-probs of the trainer for these tokens. Set [train] debug_table_every = 1 " +
    "to record them.",
  advantage: "These tokens have no advantage: the trajectory was not scored for training.",
};

export function Numbers({ tokens, token }: { tokens: Tokens; token: number | null }) {
  const index = token === null ? -1 : token - tokens.start;
  if (index < 0 || index >= tokens.ids.length) {
    return <section class="card numbers-of">Point at a token below, or use ← and →.</section>;
  }
  const [logprob, ratio] = [tokens.logprobs[index], difference(tokens, index)];
  const rows: [string, string][] = [
    ["token", `${token} of ${tokens.num_tokens}`],
    ["id", `${tokens.ids[index]}${tokens.special[index] ? " (special)" : ""}`],
    ["text", tokens.texts ? visible(tokens.texts[index]) : "the run's tokenizer is gone"],
    ["by", tokens.sources[index].toLowerCase()],
    ["policy", tokens.versions[index] ?? "–"],
    ["log-prob, engine", number(logprob, 6)],
    ["probability", typeof logprob === "number" ? number(Math.exp(logprob), 4) : "–"],
    ["log-prob, trainer", number(tokens.trainer_logprobs[index], 6)],
    ["trainer − engine", number(difference(tokens, index), 4)],
    ["ratio", typeof ratio === "number" ? number(Math.exp(ratio), 5) : "–"],
    ["log-prob, reference", number(tokens.ref_logprobs[index], 6)],
    ["advantage", number(tokens.advantages[index], 5)],
    ["trained", tokens.trained[index] ? "yes" : "no"],
    ["turn", tokens.turns[index] === null ? "–" : `${(tokens.turns[index] as number) + 1}`],
    ["message", number(tokens.messages[index])],
  ];
  return (
    <section class="card numbers-of" aria-label="Token" aria-live="polite">
      <table>
        {rows.map(([name, value]) => (
          <tr>
            <th scope="row">{name}</th>
            <td>{value}</td>
          </tr>
        ))}
      </table>
    </section>
  );
}
