export const KEY = "xsake-theme";

/** Runs before anything is painted, so that a chosen theme does not flash. */
export const APPLY = `try{var t=localStorage.getItem("${KEY}");if(t)document.documentElement.style.colorScheme=t}catch(e){}`;
