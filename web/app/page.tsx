import { Drawing } from "@/components/home/drawing";
import { Headlines } from "@/components/home/headlines";
import { PAGES } from "@/lib/pages";

export default function Home() {
  return (
    <>
      <h1>Attention over the blocks that matter</h1>
      <p className="lead">
        XSAKE is block-sparse attention for JAX. It measures where every head of a model really looks, gives each head its own
        budget of key blocks, and skips all the others, forward and backward. That is HADS: head-adaptive dynamic sparsity.
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
      <p>
        Never seen sparse attention? <a href="/play/?tour=1">Take the five-step tour.</a>
      </p>
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
