#!/usr/bin/env bash
# Predict every GeoTIFF below a folder, export overlays, and count the labels.
#
#   examples/predict_folder.sh scenes/ predictions.jsonl
#
# Run it again to resume, or after files were added: finished images are skipped.
set -euo pipefail
scenes=${1:?which folder?}
output=${2:?which file for the records?}

status=0
find "$scenes" -name '*.tif' -print0 | sort -z |
  tnet predict - -0 --output "$output" || status=$?

# Exit code 8: some images failed, the others are done.
if [ "$status" -ne 0 ] && [ "$status" -ne 8 ]; then
  exit "$status"
fi
tnet export "$output" -o "${output%.jsonl}-overlays/" -f geojson --overwrite -q > /dev/null
python3 - "$output" <<'EOF'
import collections, json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
for label, count in collections.Counter(r.get("label") or r["status"] for r in records).most_common():
    print(f"{count:6} {label}")
EOF
exit "$status"
