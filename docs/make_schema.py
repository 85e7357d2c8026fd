"""Write docs/prediction.schema.json, the JSON Schema of prediction records."""

import json
from pathlib import Path

from tnetcli.prediction.record import Prediction

PATH = Path(__file__).with_name("prediction.schema.json")


if __name__ == "__main__":
    PATH.write_text(json.dumps(Prediction.model_json_schema(), indent=2) + "\n", encoding="utf-8")
