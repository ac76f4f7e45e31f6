export default function P(){return <h1>benchmarks</h1>}
