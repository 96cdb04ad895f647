#!/bin/sh
python3 - <<'END'
import json
json.dump({"sum": sum(json.load(open("data.json")))}, open("sum.json", "w"))
END
