import sys

from millstream_client.service_config import RECOMMENDED, to_json

if __name__ == "__main__":
    sys.stdout.write(to_json(RECOMMENDED, indent=2) + "\n")
