import type { Metadata, Viewport } from "next";
import type { ReactNode } from "react";
import { Nav } from "@/components/nav";
import { Theme } from "@/components/theme";
import { APPLY } from "@/lib/theme";
import "./globals.css";

export const metadata: Metadata = {
  title: { default: "XSAKE", template: "%s · XSAKE" },
  description: "Attention over the blocks that matter, with a budget for every head.",
  icons: { icon: "/icon.svg" },
};

export const viewport: Viewport = { width: "device-width", initialScale: 1 };

export default function Layout({ children }: { children: ReactNode }) {
  return (
    <html lang="en" suppressHydrationWarning>
      <head>
        <script dangerouslySetInnerHTML={{ __html: APPLY }} />
      </head>
      <body>
        <a className="skip" href="#main">
          Skip to the content
        </a>
        <header className="top">
          <div className="frame">
            <a className="brand" href="/">
              XSAKE
            </a>
            <Nav />
            <Theme />
          </div>
        </header>
        <main id="main" tabIndex={-1}>
          <div className="frame">{children}</div>
        </main>
        <footer className="end">
          <div className="frame small quiet">
            Every number here is read from a run folder, a profile or a result file, or computed by the
            library on this machine. <a href="/openapi.json">API</a> · <a href="/metrics">metrics</a>
          </div>
        </footer>
      </body>
    </html>
  );
}
