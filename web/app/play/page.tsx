export default function P(){return <h1>play</h1>}
