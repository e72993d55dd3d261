import sys, tempfile, json, collections
from pathlib import Path
from support_cases import CASES
from support_run import run_all, outcome_of
words = sys.argv[1:]
cases = [c for c in CASES if not words or any(w in c.id for w in words)]
folder = Path(tempfile.mkdtemp())
found = run_all(cases, folder)
json.dump(found, open(folder/"found.json","w"))
ok = 0
for c in cases:
    o, p = outcome_of(c, found[c.id])
    if o == c.expected_here() and not p: ok += 1; continue
    print("##", c.id, "->", o, "expected", c.expected_here())
    for x in p: print("    ", x.strip()[-1500:].replace("\n", "\n      "))
    a = found[c.id]["save"].get("absent")
    if a: print("     absent", a)
for how in ("save","saved","live"):
    s = {k: (v[how] or {}).get("secs",0) for k,v in found.items()}
    print(how, round(sum(s.values()),1), sorted(s.items(), key=lambda kv:-kv[1])[:4])
print(ok, "of", len(cases), folder)
