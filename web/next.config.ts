import type { NextConfig } from "next";

// Plain files that `xsake serve` sends: /play/ is play/index.html. Nothing runs on a Node server.
const config: NextConfig = {
  output: "export",
  trailingSlash: true,
  images: { unoptimized: true },
  poweredByHeader: false,
};

export default config;
