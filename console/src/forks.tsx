// How the sequences of a trajectory hang together: where each leaves an earlier one, and why.

import type { Branch } from "./answers";
import { linkTo, useAnswer, type Address } from "./hooks";
import { number, Problem, visible } from "./texts";

export function ForkTree({ path, address }: { path: string; address: Address }) {
  const { value, error } = useAnswer<{ branches: Branch[] }>(`${path}/forks`);
  if (error) return <Problem text={error.message} />;
  const branches = value?.branches ?? [];
  return (
    <section class="card" aria-label="Fork tree" id="forks">
      <h2>Fork tree</h2>
      <Children branches={branches} parent={null} address={address} />
    </section>
  );
}

type Props = { branches: Branch[]; parent: number | null; address: Address };

function Children({ branches, parent, address }: Props) {
  const own = branches.filter((branch) => branch.parent === parent);
  if (own.length === 0) return null;
  return (
    <ul class="forks">
      {own.map((branch) => (
        <li key={branch.sequence}>
          <a
            href={linkTo("trajectory", {
              ...Object.fromEntries(address.values),
              sequence: `${branch.sequence}`,
              token: `${branch.num_shared}`,
              start: "",
            })}
          >
            sequence {branch.sequence + 1}
          </a>{" "}
          {number(branch.num_tokens)} tokens, turns{" "}
          {branch.turns.map((turn) => turn + 1).join(", ") || "none"}
          {branch.parent !== null && (
            <>
              : {branch.cause.toLowerCase().replaceAll("_", " ")}, shares{" "}
              {number(branch.num_shared)} tokens with sequence {branch.parent + 1}
              <dl class="difference">
                <dt>sequence {branch.parent + 1} went on</dt>
                <dd>
                  <pre>{visible(branch.before) || "(it ended there)"}</pre>
                </dd>
                <dt>the next prompt has</dt>
                <dd>
                  <pre>{visible(branch.after) || "(nothing: it samples there)"}</pre>
                </dd>
              </dl>
            </>
          )}
          <Children branches={branches} parent={branch.sequence} address={address} />
        </li>
      ))}
    </ul>
  );
}
