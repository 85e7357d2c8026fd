#!/usr/bin/env bash
# Predict every GeoTIFF below a folder, keep the records, and count the labels.
#
#   examples/predict_folder.sh scenes/ predictions.jsonl
#
# Run it again after a stop, or when files were added: what is done is not done again.
set -euo pipefail
scenes=${1:?which folder?}
output=${2:?which file for the records?}

status=0
find "$scenes" -name '*.tif' -print0 | sort -z |
  tnet predict - -0 --output "$output" --overlay "${output%.jsonl}-overlays" || status=$?

# 8 says that some images failed: the others are worth looking at all the same.
if [ "$status" -ne 0 ] && [ "$status" -ne 8 ]; then
  exit "$status"
fi
python3 - "$output" <<'EOF'
import collections, json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
for label, count in collections.Counter(r.get("label") or r["status"] for r in records).most_common():
    print(f"{count:6} {label}")
EOF
exit "$status"
