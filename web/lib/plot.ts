// The parts of Observable Plot that the pages use, so that the others are left out of the bundle.

export {
  areaY,
  axisX,
  axisY,
  barX,
  barY,
  dot,
  gridX,
  gridY,
  lineY,
  link,
  plot,
  pointer,
  pointerX,
  ruleX,
  ruleY,
  text,
  tip,
} from "@observablehq/plot";
