"use client";

import { usePathname } from "next/navigation";
import { PAGES } from "@/lib/pages";

// Plain links: a page is a document of its own, and its whole state is in its address.
export function Nav() {
  const path = usePathname();
  return (
    <nav aria-label="Pages">
      {PAGES.map((page) => (
        <a key={page.path} href={page.path} aria-current={path === page.path ? "page" : undefined}>
          {page.name}
        </a>
      ))}
    </nav>
  );
}
