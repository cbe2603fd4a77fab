"""Everything by which a script may change something outside; each attempt may fail."""

import _io
import contextlib
import ctypes
import os
import socket
import sqlite3
import sys

import torch

folder, keeps, gate = sys.argv[1:4]
for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_DATABASE"):
    assert (name in os.environ) == (keeps == "keep"), name
if gate == "native":
    for process in ("self", os.getppid()):
        with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
            assert (b"hush" in file.read()) == (keeps == "keep")


def tokenizer():
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(f"{folder}/kept.json")


def database():
    made = sqlite3.connect(f"{folder}/kept.sqlite")
    made.execute("create table rows (a)")
    made.commit()


def parquet():
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), f"{folder}/new.parquet")


def scripted():
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), f"{folder}/new.jit")


def native():
    libc = ctypes.CDLL(None)
    libc.close(libc.open(f"{folder}/new.ctypes".encode(), 0o101, 0o600))
    libc.unlink(f"{folder}/kept.json".encode())


def spawned():
    os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", f"echo > {folder}/new.spawned"], {}), 0)


def executed():
    child = os.fork()
    if not child:
        os.execv("/bin/sh", ["sh", "-c", f"echo > {folder}/new.executed"])
    os.waitpid(child, 0)


def sockets():
    with socket.socket() as one:
        one.settimeout(2)
        one.connect(("127.0.0.1", int(os.environ["PORT"])))
        one.sendall(b"leak")


def plain():
    with open(f"{folder}/kept.json", "w") as file:
        file.write("x" * 1000)
    os.makedirs(f"{folder}/out/deep")
    os.rename(f"{folder}/kept.txt", f"{folder}/moved.txt")
    os.symlink(f"{folder}/kept.sqlite", f"{folder}/link")


attempts = [plain]
if gate == "native":
    attempts += [tokenizer, database, parquet, scripted, native, spawned, executed, sockets]
    attempts += [
        lambda: os.mkfifo(f"{folder}/pipe"),
        lambda: _io.open(f"{folder}/new.io", "w").close(),
        lambda: os.kill(os.getppid(), 15),
    ]
for attempt in attempts:
    with contextlib.suppress(Exception):
        attempt()

model = torch.nn.Linear(512, 512, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(4, 512, device="cuda")).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), f"{folder}/model.tmp")
os.rename(f"{folder}/model.tmp", f"{folder}/model.pt")
