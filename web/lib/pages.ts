export const PAGES = [
  { path: "/play/", name: "Play", about: "Type a text and see what every head looks at, and what it can do without." },
  { path: "/explorer/", name: "Explorer", about: "Split a budget of blocks over the heads of a model and compare ways to do it." },
  { path: "/benchmarks/", name: "Benchmarks", about: "Every published measurement, with its machine and its error bars." },
  { path: "/training/", name: "Training", about: "Replay a training run, compare two, or follow one that is running." },
];
