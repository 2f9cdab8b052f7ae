// The console: its head, its pages by address, and the keys that work everywhere.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Run } from "./answers";
import { hasToken, setToken } from "./api";
import { Config } from "./config";
import { Curves } from "./curves";
import { isExport, readHead } from "./exported";
import { change, go, linkTo, useAddress, useAnswer, useKeys, useTheme, useTicks } from "./hooks";
import "./style.css";
import { NowPage } from "./now";
import { OverviewPage } from "./overview";
import { QueuePage } from "./queue";
import { moment, Problem } from "./texts";
import { Trajectories } from "./trajectories";
import { TrajectoryPage } from "./trajectory";
import { Weights } from "./weights";

const ALL_PAGES: [string, string][] = [
  ["overview", "Overview"],
  ["trajectories", "Trajectories"],
  ["curves", "Curves"],
  ["config", "Config"],
  ["weights", "Weights"],
  ["now", "Now"],
  ["queue", "Queue"],
];
const LIVE = ["now", "queue"];
// An export has no stack that runs.
const PAGES = ALL_PAGES.filter(([page]) => !isExport() || !LIVE.includes(page));
const KNOWN = [...PAGES.map(([page]) => page), "trajectory"];
const HELP: [string, string][] = [
  [PAGES.map((_, index) => index + 1).join(", "), PAGES.map(([, title]) => title).join(", ")],
  ["r", "next run"],
  ["t", "dark or light"],
  ["?", "this help"],
  ["/", "first field to search in"],
  ["Esc", "leave a field; back to the list"],
  ["j, k, ↓, ↑", "list: next and previous row"],
  ["Enter", "list: open the row"],
  ["n, p", "next and previous page, of the list, of tokens or of publishes"],
  ["x", "list: clear filters; curves: next axis"],
  ["l", "curves: next scale"],
  ["j, k", "trajectory: next and previous of the list"],
  ["c", "trajectory: differences from another answer to its task"],
  ["g, G", "trajectory: next and previous of its group"],
  ["u", "trajectory: back to the list"],
  ["←, →", "tokens: previous and next"],
  ["m, M", "tokens: next and previous colouring"],
  ["s", "tokens: next sequence"],
  ["d", "config: only differences"],
  ...(isExport()
    ? []
    : ([
        ["!", "now: pause or resume training"],
        ["a, e", "queue: choose all; put the chosen back"],
      ] as [string, string][])),
];

function Console() {
  const address = useAddress();
  const ticks = useTicks(2);
  const [attempt, setAttempt] = useState(0);
  const [isHelping, setHelping] = useState(false);
  const [isAsking, setAsking] = useState(false);
  const [theme, flipTheme] = useTheme();
  const { value, error } = useAnswer<{ runs: Run[] }>("runs", `${ticks}/${attempt}`);
  const [last, setLast] = useState<Run[]>([]);
  const runs = value?.runs ?? last;
  if (value && value.runs !== last) setLast(value.runs);
  const name = address.values.get("run") ?? "";
  const run = runs.find((each) => each.name === name) ?? runs[0];
  const switchRun = (next: string) =>
    address.page === "trajectory" ? go("trajectories", { run: next }) : change({ run: next });
  useKeys({
    "?": () => setHelping(!isHelping),
    t: flipTheme,
    r: () => runs.length > 1 && switchRun(runs[(runs.indexOf(run) + 1) % runs.length].name),
    ...Object.fromEntries(
      PAGES.map(([page], index) => [`${index + 1}`, () => run && go(page, { run: run.name })]),
    ),
  });
  if (error?.status === 401 || isAsking) {
    const retry = () => {
      setAsking(false);
      setAttempt(attempt + 1);
    };
    return <AskToken onToken={retry} />;
  }
  const isUnknown = name !== "" && run !== undefined && run.name !== name;
  return (
    <>
      <header class="head">
        <b>Dialoop</b>
        {address.page !== "trajectory" && <h1 class="unseen">{titleOf(address.page)}</h1>}
        <nav aria-label="Pages">
          {PAGES.map(([page, title], index) => (
            <a
              href={linkTo(page, run ? { run: run.name } : {})}
              aria-current={address.page === page || (page === "trajectories" && address.page === "trajectory") ? "page" : undefined}
            >
              {title} <kbd>{index + 1}</kbd>
            </a>
          ))}
        </nav>
        <label>
          Run
          <select value={run?.name} onChange={(event) => switchRun(event.currentTarget.value)}>
            {runs.map((each) => (
              <option value={each.name}>{each.name}</option>
            ))}
          </select>
        </label>
        {run && <Reading run={run} />}
        {isExport() && <Exported />}
        <span class="space" />
        {hasToken() && (
          <button type="button" onClick={() => setAsking(true)}>
            Another token
          </button>
        )}
        <button type="button" onClick={flipTheme}>
          {theme === "dark" ? "Light" : "Dark"} <kbd>t</kbd>
        </button>
        <button type="button" aria-expanded={isHelping} onClick={() => setHelping(!isHelping)}>
          Keys <kbd>?</kbd>
        </button>
      </header>
      {isHelping && (
        <dl class="help">
          {HELP.map(([keys, text]) => (
            <div>
              <dt>
                <kbd>{keys}</kbd>
              </dt>
              <dd>{text}</dd>
            </div>
          ))}
        </dl>
      )}
      {error && <Problem text={error.message} />}
      {isUnknown && <Problem text={`There is no run '${name}' here; this is ${run.name}.`} />}
      {!KNOWN.includes(address.page) && (
        <Problem text={`There is no page '${address.page.slice(0, 40)}' here. Choose one above.`} />
      )}
      {!run && value && <main>There is no run here.</main>}
      {run && address.page === "overview" && (
        <OverviewPage key={run.name} run={run} theme={theme} />
      )}
      {run && address.page === "trajectories" && <Trajectories run={run} address={address} />}
      {run && address.page === "trajectory" && <TrajectoryPage run={run} address={address} />}
      {run && address.page === "curves" && (
        <Curves runs={runs} run={run} address={address} theme={theme} />
      )}
      {run && address.page === "config" && <Config runs={runs} run={run} address={address} />}
      {run && address.page === "weights" && <Weights key={run.name} run={run} />}
      {run && !isExport() && address.page === "now" && <NowPage key={run.name} run={run} />}
      {run && !isExport() && address.page === "queue" && <QueuePage key={run.name} run={run} />}
    </>
  );
}

function titleOf(page: string): string {
  return PAGES.find(([name]) => name === page)?.[1] ?? "No such page";
}

/** Say that this is a copy, and of when. */
function Exported() {
  const [time, setTime] = useState<number | null>(null);
  useEffect(() => {
    readHead()
      .then((head) => setTime(head.time))
      .catch(() => undefined); // every page names what is wrong with the export
  }, []);
  return <span class="reading">exported {moment(time)}</span>;
}

function Reading({ run }: { run: Run }) {
  const { num_bytes, num_bytes_of_run, num_bad_lines } = run.progress;
  const percent = num_bytes_of_run ? Math.floor((100 * num_bytes) / num_bytes_of_run) : 100;
  return (
    <span class="reading" role="status">
      {percent < 100 && !isExport() && `reading: ${percent} %`}
      {num_bad_lines > 0 && ` ${num_bad_lines} lines cannot be read`}
    </span>
  );
}

function AskToken({ onToken }: { onToken: () => void }) {
  const [token, set] = useState("");
  return (
    <form
      class="ask"
      onSubmit={(event) => {
        event.preventDefault();
        setToken(token);
        onToken();
      }}
    >
      <label>
        Your token (DIALOOP_TOKEN, or DIALOOP_ADMIN_TOKEN to pause and requeue where there is one)
        <input
          type="password"
          autocomplete="off"
          value={token}
          onInput={(event) => set(event.currentTarget.value)}
        />
      </label>
      <button type="submit">Open</button>
    </form>
  );
}

render(<Console />, document.getElementById("page") as HTMLElement);
