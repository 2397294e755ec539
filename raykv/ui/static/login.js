// Trades the token for a cookie that scripts can't read, and goes to the page.

const refused = document.getElementById("refused");

document.getElementById("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = document.getElementById("token").value.trim();
  const headers = { Authorization: `Bearer ${token}` };
  const answer = await fetch("authenticate", { method: "POST", headers }).catch(() => null);
  if (answer?.ok) location.replace("./");
  else refused.textContent = answer ? await answer.text() : "The page's server does not answer.";
});
