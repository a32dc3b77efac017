# usage: bash gpu1.sh KEEP ; results to $OUT
KEEP=$OUT; export OUT=/tmp/r; mkdir -p $OUT; cp -n benchmarks/results/gpu_first_hour/*.json $OUT/
export FXREMAT_CACHE=/tmp/fx PYTHONPATH=. PYTHONUNBUFFERED=1 KINETO_LOG_LEVEL=99
save() { tar czf $KEEP/r.tgz -C /tmp r; }
part() { s=$1; shift; t=$(date +%s); timeout $s "$@" > /tmp/r/$LOG.log 2>&1; echo "$LOG rc $? in $(( $(date +%s) - t )) s"; tail -n 25 /tmp/r/$LOG.log | cut -c1-330; save; }
nvidia-smi --query-gpu=name,memory.total --format=csv
eval "$PARTS"
save
