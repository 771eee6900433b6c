// Fills the sections of the page.

// The theme of the system, until the button is used.
function themeButton() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  dark.addEventListener("change", name);
  name();
}

function fill(id, content) {
  if (content.length) put(document.getElementById(id), {}, content).hidden = false;
}

themeButton();
fill("proviruses", data.tracks.length ? provirusCards() : []);
fill("contigs", contigTable());
applyFilter();
fill("plots", scorePlots());
document.documentElement.dataset.ready = "yes";
