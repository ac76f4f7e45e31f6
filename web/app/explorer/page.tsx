export default function P(){return <h1>explorer</h1>}
