#!/bin/sh
cat > max.js <<'END'
console.log(Math.max(...process.argv.slice(2).map(Number)));
END
