// Children that outlive their parent and hold its output open.
const { spawn } = require("child_process");
for (let i = 0; i < 4; i++) {
  const child = spawn("/bin/sh", ["-c", "trap '' TERM HUP INT; while :; do sleep 1; echo 49; done"], {
    detached: true,
    stdio: "inherit",
  });
  child.on("error", () => {});
  child.unref();
}
setTimeout(() => process.exit(0), 300);
