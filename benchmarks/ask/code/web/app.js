// The page polls for new messages and shows them at the top of the list.
const INTERVAL_MS = 4000;

export function start(list, server) {
  setInterval(async () => {
    for (const message of await server.newMessages()) {
      list.prepend(element(message));
    }
  }, INTERVAL_MS);
}
