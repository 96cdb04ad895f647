const { execFileSync } = require("child_process");
const fs = require("fs");
let right = 0;
try {
  right = Number(execFileSync(process.execPath, ["max.js", "3", "42", "-7"]).toString().trim() === "42");
} catch (error) {}
fs.writeFileSync("/logs/verifier/reward.txt", String(right));
