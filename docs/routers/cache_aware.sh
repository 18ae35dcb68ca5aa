#!/bin/sh
# A router that sends a prompt to the server that has its beginning in the prefix cache, else to the least busy one.
# pip install sglang-router==0.3.2, then:  cache_aware.sh http://10.0.0.2:11434 http://10.0.0.3:11434
#
# A prompt goes where most of its text was before if that is more than the threshold's share of it, and the servers'
# loads do not differ too much: by more than `abs` requests and `rel` times. Text is counted, not tokens: the router
# needs no tokenizer. Servers that fail three health checks get nothing until they pass one.
exec sglang-router launch \
    --host "${ROUTER_HOST:-127.0.0.1}" --port "${ROUTER_PORT:-8000}" \
    --prometheus-host 127.0.0.1 --prometheus-port "${ROUTER_METRICS_PORT:-29000}" \
    --policy cache_aware --cache-threshold 0.3 --balance-abs-threshold 8 --balance-rel-threshold 1.5 \
    --health-check-endpoint /health --health-check-interval-secs "${ROUTER_HEALTH_S:-5}" --health-failure-threshold 3 \
    --retry-max-retries 3 --request-timeout-secs 1800 --max-payload-size 268435456 \
    --worker-urls "$@"
