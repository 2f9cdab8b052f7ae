// How values and model text are shown. Text of a model becomes text nodes and nothing else.

import type { Summary, Value } from "./answers";

export function number(value: Value | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (Math.abs(value) < 1e-4) return value.toExponential(digits - 1).replace(/\.?0*e/, "e");
  return Number(value.toPrecision(digits)).toString();
}

/** A change: "+0.043", "−0.1". */
export function signed(value: number, digits = 3): string {
  return `${value < 0 ? "−" : "+"}${number(Math.abs(value), digits)}`;
}

export function duration(seconds: number): string {
  const [minutes, hours] = [Math.floor(seconds / 60), Math.floor(seconds / 3600)];
  if (hours > 0) return `${hours} h ${minutes % 60} min`;
  return minutes > 0 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${number(seconds, 3)} s`;
}

/** A value of JSON without the quotation marks of a text; "" for null. */
export function bare(json: string): string {
  if (json === "null") return "";
  return json.startsWith('"') ? String(JSON.parse(json)) : json;
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(value: Value | undefined): string {
  if (typeof value !== "number") return number(value);
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${number(value / 1000 ** power, 3)} ${UNITS[power]}`;
}

/** The moment in the reader's time zone: "2026-11-23 19:02:11". */
export function moment(seconds: number | null): string {
  if (seconds === null) return "–";
  const date = new Date(1000 * seconds);
  const local = new Date(date.getTime() - 60000 * date.getTimezoneOffset());
  return Number.isNaN(date.getTime()) ? "–" : local.toISOString().slice(0, 19).replace("T", " ");
}

export function policy(summary: Summary): string {
  if (summary.oldest === null) return "–";
  const range = summary.oldest === summary.newest ? "" : `…${summary.newest}`;
  return `${summary.lineage}-${summary.oldest}${range}`;
}

export function contentText(content: unknown): string {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  return JSON.stringify(content, null, 1);
}

// Characters without a shape of their own, or that turn the text around them.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

export function visible(text: string): string {
  return text
    .replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`)
    .replace(/\t/g, "→\t")
    .replace(/ /g, "·")
    .replace(/\n/g, "⏎\n");
}

export function plain(text: string): string {
  return text.replace(
    HIDDEN,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** A key or path that may be broken after its dots and strokes, and not inside of a word. */
export function Breakable({ text }: { text: string }) {
  return <>{text.split(/(?<=[._/:])/).flatMap((part, place) => (place ? [<wbr />, part] : [part]))}</>;
}

export function Problem({ text }: { text: string }) {
  return (
    <p class="problem" role="alert">
      {text}
    </p>
  );
}

/** A reward in colour: blue from 1 on, orange down to 0 and below. */
export function Reward({ value, name }: { value: Value | undefined; name?: string }) {
  if (value === null || value === undefined) return <span class="reward">no reward</span>;
  const share = typeof value === "number" ? Math.max(0, Math.min(1, value)) : 0;
  return (
    <span class="reward" style={{ "--share": `${Math.round(100 * share)}%` }}>
      {name && `${plain(name)} `}
      <b>{number(value, 3)}</b>
    </span>
  );
}
