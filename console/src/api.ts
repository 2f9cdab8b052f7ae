// How the console's routes are asked, or an export in their place.

import { Refusal } from "./answers";
import { answerOf, isExport } from "./exported";

const TOKEN = "dialoop-token";

export function setToken(token: string): void {
  sessionStorage.setItem(TOKEN, token);
}

export function hasToken(): boolean {
  return sessionStorage.getItem(TOKEN) !== null;
}

function headers(): Record<string, string> {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { authorization: `Bearer ${token}` } : {};
}

async function answered(answer: Response): Promise<Response> {
  if (answer.ok) return answer;
  const body = await answer.json();
  throw new Refusal(answer.status, `${body.detail ?? answer.statusText} ${body.remedy ?? ""}`);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  if (isExport()) {
    const value = await answerOf(path);
    signal?.throwIfAborted();
    return value as T;
  }
  const answer = await answered(await fetch(`api/${path}`, { headers: headers(), signal }));
  return (await answer.json()) as T;
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  const answer = await fetch(`api/${path}`, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  return (await (await answered(answer)).json()) as T;
}

/** Call `show` with each server-sent event until the signal ends it. EventSource has no headers. */
export async function follow<T>(
  path: string,
  show: (event: T) => void,
  signal: AbortSignal,
): Promise<void> {
  const answer = await answered(await fetch(`api/${path}`, { headers: headers(), signal }));
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) show(JSON.parse(event.replace(/^data: /, "")) as T);
  }
}

export function query(values: [string, string][]): string {
  return new URLSearchParams(values.filter(([, value]) => value !== "")).toString();
}
