"use client";

import type { Schemas } from "@/lib/api";
import { fixed, percent, visible } from "@/lib/format";

/** The most likely next words, by tokens: with this method, and with dense attention. */
export function NextToken({ found }: { found: Schemas["MethodFigures"] }) {
  const most = Math.max(...found.next.map((x) => Math.max(x.probability, x.dense_probability)), 1e-9);
  return (
    <>
      <table className="bars small">
        <caption className="hidden-text">Probabilities of the next word</caption>
        <thead className="quiet">
          <tr>
            <th scope="col">word</th>
            <th scope="col"><span className="hidden-text">bar</span></th>
            <th scope="col">method</th>
            <th scope="col">dense</th>
          </tr>
        </thead>
        <tbody>
          {found.next.map((x) => (
            <tr key={x.id}>
              <th scope="row">
                <code>{visible(x.text)}</code>
              </th>
              <td className="bar" aria-hidden="true">
                <div className="meter">
                  <i style={{ width: percent(x.probability / most) }} />
                  <i className="second" style={{ width: percent(x.dense_probability / most) }} />
                </div>
              </td>
              <td className="nowrap">{percent(x.probability)}</td>
              <td className="nowrap quiet">{percent(x.dense_probability)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <ul className="legend">
        <li><i style={{ background: "var(--accent)" }} />this method</li>
        <li><i style={{ background: "var(--c8)" }} />dense attention</li>
        <li>KL(dense ‖ sparse) {fixed(found.next_kl, 4)} nats</li>
      </ul>
    </>
  );
}
