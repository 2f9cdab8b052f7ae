// What runs were started with, and where they differ.

import { useState } from "preact/hooks";
import type { ConfigLines, Run } from "./answers";
import { query } from "./api";
import { go, useAnswer, useKeys, type Address } from "./hooks";
import { plain, Problem } from "./texts";

export function Config({ runs, run, address }: { runs: Run[]; run: Run; address: Address }) {
  const { values } = address;
  const chosen = values.getAll("run").filter((name) => runs.some((each) => each.name === name));
  const shown = chosen.length ? chosen : [run.name];
  const [words, setWords] = useState("");
  const onlyDifferences = values.get("only") === "differences";
  const asked = query(shown.map((name): [string, string] => ["run", name]));
  const { value, error } = useAnswer<ConfigLines>(`config?${asked}`);
  const set = (all: string[], only: boolean) => {
    const next = new URLSearchParams(all.map((name) => ["run", name]));
    if (only) next.set("only", "differences");
    go("config", next);
  };
  const flip = (name: string) =>
    shown.includes(name) ? shown.filter((each) => each !== name) : [...shown, name];
  useKeys({
    d: () => set(shown, !onlyDifferences),
    "/": () => document.getElementById("config-filter")?.focus(),
  });
  const lines = (value?.lines ?? []).filter(
    (line) => line.key.includes(words) && (!onlyDifferences || line.differs),
  );
  return (
    <main>
      <div class="controls">
        {runs.map((each) => (
          <label>
            <input
              type="checkbox"
              checked={shown.includes(each.name)}
              onChange={() => set(flip(each.name), onlyDifferences)}
            />
            {each.name}
          </label>
        ))}
        <label>
          <input
            type="checkbox"
            checked={onlyDifferences}
            onChange={() => set(shown, !onlyDifferences)}
          />
          only differences (d)
        </label>
        <label>
          Key contains (/)
          <input
            id="config-filter"
            value={words}
            onInput={(event) => setWords(event.currentTarget.value)}
          />
        </label>
      </div>
      {error && <Problem text={error.message} />}
      {value && lines.length === 0 && <p>No key to show: the configs agree, or none is recorded.</p>}
      <div class="scroll" tabIndex={0} role="group" aria-label="Config">
        <table class="config">
          <thead>
            <tr>
              <th>key</th>
              {value?.runs.map((name) => (
                <th>{name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {lines.map((line) => (
              <tr key={line.key} class={line.differs ? "differs" : ""}>
                <th scope="row">{line.key}</th>
                {line.values.map((each, place) => (
                  <td data-name={shown.length > 1 ? value?.runs[place] : undefined}>{plain(each)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </main>
  );
}
