import { Drawing } from "@/components/home/drawing";
import { Headlines } from "@/components/home/headlines";
import { PAGES } from "@/lib/pages";

export default function Home() {
  return (
    <>
      <h1>Attention over the blocks that matter</h1>
      <p className="lead">
        Attention compares every token of a text with every earlier one: twice the text, four times the work. Most of these
        comparisons hardly matter. XSAKE, a library for JAX, measures where every head of a model really looks, gives each head its own
        budget of blocks of keys, and skips all the others, forward and backward. That is HADS: head-adaptive dynamic sparsity.
      </p>
      <p>
        <a className="button main" href="/play/?tour=1">See it on a real model, in five steps</a>
      </p>
      <ul className="pages">
        {PAGES.map((page) => (
          <li key={page.path}>
            <h2>
              <a href={page.path}>{page.name}</a>
            </h2>
            <p className="quiet">{page.about}</p>
          </li>
        ))}
      </ul>
      <h2>Measured</h2>
      <Headlines />
      <section className="panel">
        <h2>How it fits together</h2>
        <p className="quiet">Choose a part to read what it does.</p>
        <Drawing />
      </section>
    </>
  );
}
