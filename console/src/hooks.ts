// The address, keys, theme and answers of the service, as hooks.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Refusal } from "./answers";
import { follow, get } from "./api";

export type Address = { page: string; values: URLSearchParams };

export function readAddress(): Address {
  const [page, values] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page || "overview", values: new URLSearchParams(values ?? "") };
}

export function linkTo(page: string, values: URLSearchParams | Record<string, string>): string {
  const text = new URLSearchParams(values).toString();
  return text ? `#/${page}?${text}` : `#/${page}`;
}

export function go(page: string, values: URLSearchParams | Record<string, string>): void {
  location.hash = linkTo(page, values);
}

/** Change some values of this address; "" takes one out. `replace` leaves no step to go back to. */
export function change(changes: Record<string, string>, replace = false): void {
  const { page, values } = readAddress();
  for (const [name, value] of Object.entries(changes)) {
    if (value === "") values.delete(name);
    else values.set(name, value);
  }
  if (!replace) go(page, values);
  else {
    history.replaceState(null, "", linkTo(page, values));
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}

export function useAddress(): Address {
  const [address, setAddress] = useState(readAddress);
  useEffect(() => {
    const read = () => setAddress(readAddress());
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  return address;
}

export type Answer<T> = { value: T | null; error: Refusal | null; isLoading: boolean };

/** Ask for a path; the old answer stays until the new one is here. `version` asks again. */
export function useAnswer<T>(path: string | null, version: unknown = 0): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T>>({ value: null, error: null, isLoading: true });
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    setAnswer((old) => ({ ...old, isLoading: true }));
    get<T>(path, abort.signal)
      .then((value) => setAnswer({ value, error: null, isLoading: false }))
      .catch((error) => {
        if (abort.signal.aborted) return;
        const refusal = error instanceof Refusal ? error : new Refusal(0, "The console is stopped.");
        setAnswer({ value: null, error: refusal, isLoading: false });
      });
    return () => abort.abort();
  }, [path, version]);
  return answer;
}

/** The newest event of a path, none for null; it is asked again when the connection ends. */
export function useEvents<T>(path: string | null): { event: T | undefined; error: string } {
  const [state, setState] = useState<{ event: T | undefined; error: string }>({
    event: undefined,
    error: "",
  });
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    let timer = 0;
    const listen = () =>
      follow<T>(path, (event) => setState({ event, error: "" }), abort.signal)
        .catch((error) => {
          if (abort.signal.aborted) return;
          const text = error instanceof Refusal ? error.message : "The console is stopped.";
          setState({ event: undefined, error: text });
        })
        .then(() => {
          if (!abort.signal.aborted) timer = window.setTimeout(listen, 2000);
        });
    setState({ event: undefined, error: "" });
    listen();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path]);
  return state;
}

/** A number that grows every `seconds` while the page is visible. */
export function useTicks(seconds: number): number {
  const [ticks, setTicks] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => {
      if (!document.hidden) setTicks((count) => count + 1);
    }, 1000 * seconds);
    return () => clearInterval(timer);
  }, [seconds]);
  return ticks;
}

/** Whether a media query holds now. */
export function useMedia(text: string): boolean {
  const query = matchMedia(text);
  const [holds, setHolds] = useState(query.matches);
  useEffect(() => {
    const read = () => setHolds(query.matches);
    query.addEventListener("change", read);
    return () => query.removeEventListener("change", read);
  }, [text]);
  return holds;
}

export type Keys = Record<string, (event: KeyboardEvent) => void>;

/** Call a function for a key, but not while somebody types into a field. */
export function useKeys(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  const listen = useCallback((event: KeyboardEvent) => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const kind = target instanceof HTMLInputElement ? target.type : "";
    // A box that was clicked keeps the focus, but nobody types into it.
    const isBox = kind === "checkbox" || kind === "radio";
    if (kind === "radio" && event.key.startsWith("Arrow")) return;
    if (["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName) && !isBox) {
      if (event.key === "Escape") target.blur();
      return;
    }
    // Enter on a link or button is the browser's.
    if (event.key === "Enter" && ["A", "BUTTON", "SUMMARY"].includes(target.tagName)) return;
    const act = latest.current[event.key];
    if (act) {
      event.preventDefault();
      act(event);
    }
  }, []);
  useEffect(() => {
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, [listen]);
}

const THEME = "dialoop-theme";

/** The theme in use ("light" or "dark"), and a switch that is remembered. */
export function useTheme(): [string, () => void] {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [theme, setTheme] = useState(
    () => localStorage.getItem(THEME) ?? (system.matches ? "dark" : "light"),
  );
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  useEffect(() => {
    const follow = () => {
      if (!localStorage.getItem(THEME)) setTheme(system.matches ? "dark" : "light");
    };
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  const flip = () => {
    const other = theme === "dark" ? "light" : "dark";
    localStorage.setItem(THEME, other);
    setTheme(other);
  };
  return [theme, flip];
}
