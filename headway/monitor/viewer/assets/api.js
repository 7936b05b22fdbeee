// Calls to the server; the cookie that the link with the access token has set goes along by itself.

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const answer = await fetch(`api/${path}?${query}`, { signal });
  const body = await answer.json().catch((error) => { if (error.name === "AbortError") throw error; return {}; });
  if (!answer.ok) throw new Error(body.error ?? `the viewer answered ${answer.status}; is it still running?`);
  return body;
}
