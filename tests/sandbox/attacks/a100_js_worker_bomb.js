// Workers and timers without end.
const { Worker } = require("worker_threads");
const source = "setInterval(() => {}, 1); while (true) {}";
let started = 0;
process.on("uncaughtException", () => {});
setInterval(() => {
  try {
    new Worker(source, { eval: true }).on("error", () => {});
    started += 1;
    console.error("started", started);
  } catch (error) {
    console.error(error.code);
  }
}, 1);
