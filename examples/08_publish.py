"""Step 8 of 8: publish the export with a model card that says what was trained, on what, and with which score.

python examples/08_publish.py                 # runs/published: look at README.md
python examples/08_publish.py you/help-desk   # the hub, with `hf auth login`
"""

import shutil
import sys
from pathlib import Path

from huggingface_hub import HfApi

FOLDER = Path("runs/published")


if __name__ == "__main__":
    shutil.copytree("runs/exported", FOLDER, dirs_exist_ok=True)
    shutil.copy("runs/arms/credit/README.md", FOLDER)  # the model card of step 4
    print((FOLDER / "README.md").read_text("utf-8").partition("## This run")[2].strip())
    if len(sys.argv) > 1:
        hub = HfApi()
        hub.create_repo(sys.argv[1], exist_ok=True)
        print(hub.upload_folder(repo_id=sys.argv[1], folder_path=FOLDER, commit_message="Train on a help desk"))
