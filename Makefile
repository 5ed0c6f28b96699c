# culvert: make demo shows it, make test proves it. "make help" lists the rest.

GO        ?= go
BIN       := bin/culvert
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS   := -X culvert.dev/cmd/culvert/command.version=$(VERSION)
FUZZTIME  ?= 60s
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.1.4

# Go's cache keeps what is compiled for each set of flags. Few of them serve all targets: a set costs minutes where nothing was
# compiled before. With the race detector it has to be cgo; PLAIN is all else, and as the image is built.
export GOFLAGS := $(filter-out -trimpath,$(shell $(GO) env GOFLAGS)) -trimpath
PLAIN := CGO_ENABLED=0
RACE  := CGO_ENABLED=1 $(GO) test -race
# Every program with the race detector would sleep for a second as it ends, so that goroutines left to themselves may race yet.
export GORACE ?= atexit_sleep_ms=0

# What this machine can't run is left out and counted: every part of it is a line of this file, written by these targets and by
# testnet.LeaveOut, and the last line of "make check" and "make test" says how many there are. One call of make begins it anew.
export CULVERT_LEFT_OUT ?= $(CURDIR)/bin/left-out
ifeq ($(MAKELEVEL),0)
$(shell mkdir -p $(dir $(CULVERT_LEFT_OUT)) && : >$(CULVERT_LEFT_OUT))
endif

# Real programs the interoperation tests talk to, and the commands that show they are there.
PEERS         := openssl curl nginx libnginx-mod-stream haproxy gnutls-bin nodejs default-jdk-headless git python3 iproute2 nftables miniupnpd miniupnpd-nftables miniupnpc natpmpc coturn netcat-openbsd ncat openssh-client openssh-server dropbear-bin putty-tools autossh ssh-audit python3-paramiko python3-socks python3-websocket nghttp2-client ngtcp2-client ngtcp2-server bind9-dnsutils knot-dnsutils dnsperf unbound dnsmasq-base dbus-daemon chromium systemd mariadb-server-core mariadb-client-core postgresql-client postgresql-15 libpostgresql-jdbc-java redis-server redis-tools squid redsocks proxychains4 libnss3-tools qemu-user-static
PEER_COMMANDS := openssl curl nginx haproxy gnutls-cli node javac git python3 ip nft miniupnpd upnpc natpmpc turnserver turnutils_stunclient nc.openbsd ncat ssh sshd dbclient plink autossh ssh-audit nghttp h2load gtlsclient gtlsserver dig kdig dnsperf unbound dnsmasq dbus-daemon chromium systemd-analyze systemd-socket-activate busctl mariadbd mariadb psql redis-server redis-benchmark squid redsocks proxychains4 certutil pk12util qemu-arm-static

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: manifests
manifests: ## what Helm makes of the chart, for kustomize and "culvert install", and the page of its values
	cd integration/deploy && $(GO) run ./render -write
	$(GO) test ./deploy -count=1 -run '^TestThePageHasTheValues$$' -update

.PHONY: docs
docs: ## the pages of docs/reference, of the schema, the commands, the metrics, the log and the reasons
	$(GO) test . -count=1 -run '^TestReference$$' -update
	$(GO) test ./cmd/culvert/command -count=1 -run '^TestReference$$' -update

.PHONY: demo
demo: build ## a CA, services, a gateway and a client on loopback: see it work
	$(BIN) demo --once

.PHONY: build
build: ## bin/culvert
	@echo "make: building $(BIN); where nothing was compiled before it takes one to three minutes, and lists what it compiles"
	$(GO) build -v -trimpath -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/culvert

# For packages and tags that "make check" vets, with more rules.
VETTED := -vet=off

.PHONY: test
test: peers ## every test; installs the real peers first
	@# Tests wait more than they compute: four packages keep two processors busy. What ends TLS is copied with either tag.
	@$(RACE) -tags copyrelay $(VETTED) -shuffle=on -p 1 -timeout 20m ./tunnel/... ./sni ./connect ./internal/gateway & copy=$$!; \
	$(RACE) $(VETTED) -shuffle=on -p 3 -timeout 15m ./...; status=$$?; wait $$copy || status=1; exit $$status
	@# Two suites at a time: what ends makes room for the next, and what fails stops no other. Tests of networks and of reliability
	@# have limits of time: the first run beside clusters, which wait more than they compute, and begin before the others.
	@$(MAKE) build $(PLAIN)
	@$(MAKE) -k -j 2 --assume-old=build test-networks test-cluster test-peers test-portable test-copyrelay test-worlds
	@$(MAKE) -s left-out

.PHONY: left-out
left-out:
	@awk '!seen[$$0]++ { what = what (n++ ? "; " : " (") $$0 } END { if (n) print "left out: " n what ")"; else print "left out: nothing" }' $(CULVERT_LEFT_OUT)

.PHONY: test-unit
test-unit: ## the tests that need nothing but Go
	$(RACE) -tags unit -shuffle=on -p 3 -timeout 15m ./...

.PHONY: test-integration
test-integration: ## the tests against real peers, and of the examples, over both of the relay's paths
	$(MAKE) test-networks
	$(MAKE) test-peers
	$(MAKE) test-copyrelay

.PHONY: test-worlds
test-worlds:
	$(PLAIN) $(GO) test ./internal/gateway $(VETTED) -count=1 -run '^TestWorldsAgree$$' -worlds 5000

# Tests of reliability about what happens before a tunnel begins: the relay has no part in it.
NO_RELAY := TestPreambleCaps|TestSourceCaps|TestRefusalsOverEveryCarrier|TestDeadlinesAreAbsolute|TestDeadlinesAreAbsoluteAtEveryListener|TestServicePortClosed|TestServiceIsABlackHole|TestFloodsAreCheap|TestFloodsOverHTTP3AreCheap|TestNothingIsDialedForHalfAPreamble|TestAdminIsNotForClients|TestConfigurationIsUnderstoodOrRefused|TestLoopbackIsNotTrusted|TestTimesAreMonotonic|TestEveryRefusalSaysWhy|TestLogIsEscaped|TestSecretsAreNotRepeated|TestPrivateNamesAreNotTold|TestLargeTableTakesEffectInASecond|TestSlowClientsShutNobodyOut

.PHONY: test-copyrelay
test-copyrelay: build ## the tests of reliability in which bytes are relayed, over the relay that copies
	cd integration && $(PLAIN) $(GO) test -tags copyrelay $(VETTED) -shuffle=on -timeout 20m -skip '^($(NO_RELAY))$$' ./reliability -volume 32 -volume-each 4

# The tags of the program for small machines, and those packages of it that have to do with sizes, bytes and addresses.
SMALL    := nokube,nospiffe
PORTABLE := ./sni ./policy ./registry ./registry/file ./connect/proxyproto ./connect/internal/mux ./delegation ./internal/records ./internal/invitation

.PHONY: test-portable
test-portable: ## the small program for each system, and what of it an emulator can run
	@for target in darwin/arm64 windows/amd64; do \
	  CGO_ENABLED=0 GOOS=$${target%/*} GOARCH=$${target#*/} $(GO) build -trimpath -tags $(SMALL) -ldflags '-s -w' -o bin/portable/ ./cmd/culvert || exit 1; done; \
	for emulated in arm/qemu-arm-static arm64/qemu-aarch64-static; do \
	  arch=$${emulated%/*}; \
	  CGO_ENABLED=0 GOARCH=$$arch GOARM=7 $(GO) build -trimpath -tags $(SMALL) -ldflags '-s -w' -o bin/portable/culvert-$$arch ./cmd/culvert || exit 1; \
	  $${emulated#*/} bin/portable/culvert-$$arch demo --once || exit 1; done
	CGO_ENABLED=0 GOARCH=arm GOARM=7 $(GO) test -short -trimpath -tags $(SMALL) -exec qemu-arm-static $(PORTABLE)

.PHONY: test-networks
test-networks: build ## the tests in network namespaces, which need root
	@if [ "$$(id -u)" != 0 ]; then echo "not root: the tests of networks" >>$(CULVERT_LEFT_OUT); exit 0; fi; \
	$(PLAIN) $(GO) test -tags netns ./internal/testnet/netns ./internal/unixsocket ./internal/capture/... ./internal/isolate && cd integration && \
	$(RACE) -tags netns $(VETTED) -parallel 6 -timeout 20m ./networks && $(PLAIN) $(GO) test -tags netns $(VETTED) -run '^(TestLoss|TestAgent)$$' ./bench && \
	$(PLAIN) $(GO) test -tags netns $(VETTED) -run '^TestOneOutgoingPort$$' ./interop

.PHONY: test-peers
test-peers: build ## the tests against real peers, and of the examples, over the relay of the system
	@# The tests of dead peers and of networks wait for a minute, on each of the relay's paths, and do nothing: they run beside the others.
	@netns=; if [ "$$(id -u)" = 0 ]; then \
	  (cd integration && for tags in netns netns,copyrelay; do \
	    $(PLAIN) $(GO) test -tags $$tags $(VETTED) -run '^(TestDeadPeers|TestNetworkFaults|TestBadNetwork)$$' ./reliability || exit 1; done) & netns=$$!; \
	else echo "not root: the tests in network namespaces" >>$(CULVERT_LEFT_OUT); fi; \
	(cd integration/deploy && $(PLAIN) $(GO) test $(VETTED) -shuffle=on -timeout 20m ./... && cd .. && $(RACE) $(VETTED) -shuffle=on -timeout 20m ./...); status=$$?; \
	[ -z "$$netns" ] || wait $$netns || status=1; exit $$status

# Flags of the suite, as in: make conformance CONFORMANCEFLAGS="-run-test TLSRouteSimpleSameNamespace"
CONFORMANCEFLAGS   ?=
CONFORMANCE_REPORT ?= $(CURDIR)/docs/conformance/gateway-api-v1.6.3-report.yaml
CLUSTER_TEST := $(PLAIN) VERSION=$(VERSION) $(GO) test -count=1 -timeout 30m

.PHONY: conformance
conformance: ## the Gateway API's conformance suite, on a real control plane: docs/conformance
	cd integration/cluster && CONFORMANCE_REPORT=$(CONFORMANCE_REPORT) $(CLUSTER_TEST) ./conformance -run '^TestConformance$$' -v $(CONFORMANCEFLAGS)

.PHONY: conformance-mcs
conformance-mcs: ## what multi-cluster services require, and their suite where MCS_CONFORMANCE is its test program
	cd integration/cluster && MCS_CONFORMANCE=$(MCS_CONFORMANCE) $(CLUSTER_TEST) ./mcs -v

.PHONY: test-cluster
test-cluster: ## the tests in clusters of a real control plane, and the conformance suite
	@if [ "$$(id -u)" != 0 ]; then echo "not root: the tests in clusters" >>$(CULVERT_LEFT_OUT); exit 0; fi; \
	cd integration/cluster && CONFORMANCE_REPORT=$(CURDIR)/bin/conformance.yaml $(CLUSTER_TEST) $(VETTED) -p 2 ./...

.PHONY: peers
peers: ## install the real peers, by apt-get on Debian and Ubuntu
	@missing=; for c in $(PEER_COMMANDS); do command -v $$c >/dev/null 2>&1 || missing="$$missing $$c"; done; \
	[ -f /usr/lib/nginx/modules/ngx_stream_module.so ] || missing="$$missing nginx-stream"; \
	[ -f /usr/share/java/postgresql.jar ] || missing="$$missing postgresql-jdbc"; \
	for m in websocket socks paramiko; do /usr/bin/python3 -c "import $$m" 2>/dev/null || missing="$$missing python3-$$m"; done; \
	if [ -n "$$missing" ]; then \
	  echo "make: the interoperation tests need$$missing; installing: $(PEERS)"; \
	  command -v apt-get >/dev/null 2>&1 || { echo "make: no apt-get here: install them yourself, or run make test-unit"; exit 1; }; \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	  : "RUNLEVEL keeps packages from starting their services, of which squid begins with a cache of its own"; \
	  $$sudo apt-get update -q && $$sudo env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(PEERS); \
	fi
	@integration/newcurl.sh $(CURDIR)/bin/newcurl
	@integration/postgres18.sh $(CURDIR)/bin/postgres18
	@integration/resolved.sh $(CURDIR)/bin/resolved
	@integration/jwtpeers.sh $(CURDIR)/bin/jwtpeers

.PHONY: check
check: export CGO_ENABLED := 0
check: ## format, vet on three systems, static analysis, tidy
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "not gofmt-clean:"; echo "$$out"; exit 1; }
	$(GO) vet ./... && $(GO) vet -tags measure ./connect/h2 ./internal/testnet && $(GO) vet -tags nospiffe ./cmd/... ./identity/... && $(GO) vet -tags nokube,nospiffe ./cmd/...
	cd integration && $(GO) vet ./... && $(GO) vet -tags netns ./reliability ./networks ./bench ./interop && $(GO) vet -tags copyrelay ./reliability ./interop
	cd integration/coredns && $(GO) vet ./...
	cd integration/peers && $(GO) vet ./...
	cd integration/deploy && $(GO) vet ./...
	cd integration/cluster && $(GO) vet ./...
	cd integration/vet && $(GO) vet ./... && $(GO) build -o $(CURDIR)/bin/vet .
	GOOS=darwin bin/vet ./...
	GOOS=windows bin/vet ./...
	GOARCH=arm GOARM=7 $(GO) vet -tags nokube,nospiffe ./cmd/...
	$(GO) run $(STATICCHECK) ./...
	cd integration && $(GO) run $(STATICCHECK) ./...
	$(GO) mod tidy -diff
	cd integration && $(GO) mod tidy -diff
	cd integration/coredns && $(GO) mod tidy -diff
	cd integration/peers && $(GO) mod tidy -diff
	cd integration/deploy && $(GO) mod tidy -diff
	cd integration/cluster && $(GO) mod tidy -diff
	cd integration/cluster/controlplane && $(GO) mod tidy -diff
	cd integration/vet && $(GO) mod tidy -diff
	@if $(GO) run $(GOVULNCHECK) -version >/dev/null 2>&1 && curl -fsS -m 10 -o /dev/null https://vuln.go.dev/index/db.json 2>/dev/null; then \
	  $(GO) run $(GOVULNCHECK) ./...; else echo "no database of vulnerabilities: govulncheck" >>$(CULVERT_LEFT_OUT); fi
	@$(MAKE) -s left-out

# Package, target and seconds: about six minutes with what it takes to build them. No part of "make test", which must say the
# same of the same tree: what fuzzers have found is kept in testdata/fuzz and tried there.
FUZZ_SHORT := sni:FuzzParse:20 sni:FuzzQUIC:12 sni:FuzzQUICFrames:10 connect:FuzzHead:20 connect:FuzzForwardHead:6 connect:FuzzChunks:6 internal/localuser:FuzzParseAnswer:4 internal/capture/nft:FuzzRead:4 internal/activation:FuzzParse:3 \
	connect/h2:FuzzServer:15 connect/h2:FuzzClient:12 connect/h2:FuzzServerStates:12 connect/h2:FuzzClientStates:12 connect/h3:FuzzRequest:12 connect/h3:FuzzControl:10 connect/hbone:FuzzFields:8 \
	connect/h3:FuzzServerStates:10 connect/h3:FuzzClientStates:10 connect/hbone:FuzzServerStates:8 connect/hbone:FuzzClientStates:8 \
	connect/ssh:FuzzKexInit:4 connect/ws:FuzzServerStates:8 connect/ws:FuzzClientStates:8 connect/socks5:FuzzServerStates:8 connect/socks5:FuzzClientStates:8 \
	connect/ws:FuzzHandshake:10 connect/ws:FuzzFrames:12 connect/socks5:FuzzRequest:8 connect/socks5:FuzzServe:12 connect/socks5:FuzzAnswer:8 connect:FuzzReply:8 connect/connectudp:FuzzCapsules:12 connect/connectudp:FuzzPath:6 connect/connectudp:FuzzTunnelStates:8 \
	connect/proxyproto:FuzzParse:12 connect/proxyproto:FuzzInner:6 dns:FuzzQuery:12 dns:FuzzReply:12 internal/udp:FuzzHeader:5 tunnel:FuzzLoop:8 registry/snapshot:FuzzDecode:10 delegation:FuzzXFCC:6 delegation:FuzzClientCert:6 \
	delegation:FuzzVerify:6 delegation:FuzzParseHeader:6 internal/gateway/inbound:FuzzDelegations:10 registry/peer:FuzzSession:10 registry/peer:FuzzSubscriber:6 internal/gateway/upstream:FuzzFirstBytes:6 reverse:FuzzServerSession:10 reverse:FuzzClientSession:10 reverse:FuzzReplica:8 reverse:FuzzPoolProtocol:5 internal/invitation:FuzzToken:5 identity/sshkeys:FuzzAuthorizedKeys:6 \
	nat:FuzzParsePCP:5 nat:FuzzParseNATPMP:5 nat:FuzzSTUN:5 nat/upnp:FuzzDescription:6 nat/upnp:FuzzReadAnswer:5 \
	identity:FuzzParseSPIFFEID:6 identity/enroll:FuzzRequest:8 identity/bundle:FuzzParse:8 internal/names:FuzzAnswer:10 registry/alloc:FuzzPortFile:6 registry/alloc:FuzzVIPFile:6

.PHONY: fuzz-short
fuzz-short: ## a few seconds of each of the parsers that face the world, and of the event loop
	@# The fuzzer may call it a failure when its time is over as it starts something: then it has found no input that fails.
	@for t in $(FUZZ_SHORT); do \
	  pkg=$${t%%:*}; of=$${t#*:}; f=$${of%:*}; echo "fuzz $$pkg $$f"; \
	  out=$$($(GO) test ./$$pkg -run '^$$' -fuzz "^$$f\$$" -fuzztime $${of#*:}s -fuzzminimizetime 10x 2>&1); status=$$?; \
	  echo "$$out"; \
	  [ $$status = 0 ] || case "$$out" in \
	  *"Failing input"*|*"seed corpus"*) exit 1;; \
	  *"    context deadline exceeded"*) echo "make: no input failed in the time";; \
	  *) exit 1;; esac; \
	done

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME each
	@for pkg in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz'); do \
	    echo "$$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$pkg || exit 1; \
	  done; done

# With the tag "measure", tests hold the program to figures of time and of the processor. In "make test", what else the machine
# does would decide about those.
.PHONY: soak
soak: build ## figures of time and of the processor; a million short tunnels and what is left of them, 2 GiB by every way in and out, 15,000 idle tunnels over 150 connections, and 50,000 that go on to other gateways: half an hour
	$(GO) test -tags measure -count=1 -p 1 ./connect/h2 ./internal/udp ./cmd/culvert/command
	$(GO) test -tags measure -count=1 -run '^TestReloadsEndNoTunnel$$' ./internal/gateway
	cd integration && $(GO) test -tags measure -count=1 -timeout 30m ./reliability
	cd integration && $(GO) test ./reliability -count=1 -timeout 60m -v -run 'TestShortTunnelsLeaveNothing|TestBytesArriveExactly|TestWaysInCarryExactly|TestWaysOutCarryExactly|TestIdleStreams' -short-tunnels 1000000 -volume 2048 -volume-each 2048 -idle-streams 15000 -idle-onward 50000

# Flags given take the place of writing the page, so that a part of it can't overwrite the whole:
# make bench BENCHFLAGS="-only 'culvert|haproxy' -measure 'trips|conns' -slice 1s"
# make bench BENCHFLAGS="-carrier 'sni|connect' -measure 'trips|idle' -rounds 1"
# make bench BENCHFLAGS="-dns 'culvert|unbound' -rounds 1"
# make bench BENCHFLAGS="-dns . -measure paced -slice 10s"
# make bench BENCHFLAGS="-loss 'cubic|quic|h3'"
# make bench BENCHFLAGS="-tls terminated -slice 1s"
# make bench BENCHFLAGS="-policy 'by address|decisions' -slice 1s"
# make bench BENCHFLAGS="-reverse 'culvert|^frp$$' -measure 'down|beside'"
# make bench BENCHFLAGS="-agent 'captured|redsocks' -measure conns"
BENCHFLAGS ?= -o ../docs/BENCHMARKS.md

# frp and chisel, which reverse sessions are measured beside, at the versions of that module.
bin/peers: integration/peers/go.mod integration/peers/go.sum
	@echo "make: building frp and chisel; the first time it takes one to three minutes"
	cd integration/peers && $(GO) build -trimpath -o $(CURDIR)/bin/peers/ tool
	@touch bin/peers

.PHONY: bench
bench: build peers bin/peers ## side by side with HAProxy, nginx, a naive proxy and a direct connection, and with DNS servers: docs/BENCHMARKS.md
	cd integration && $(GO) run ./bench -culvert ../$(BIN) $(BENCHFLAGS)

.PHONY: bench-kube
bench-kube: ## from a change in Kubernetes to the first connection, and what 100,000 endpoints take: docs/BENCHMARKS-KUBE.md; as root
	cd integration/cluster && CULVERT_BENCH_REPORT=$(CURDIR)/docs/BENCHMARKS-KUBE.md $(CLUSTER_TEST) -run '^$$' -bench '^BenchmarkKubernetes$$' -benchtime 1x ./bench

.PHONY: profile
profile: build ## CPU and allocations of the gateway under each load of bench: bin/profile
	cd integration && $(GO) run ./bench -culvert ../$(BIN) -profile ../bin/profile $(PROFILEFLAGS)

.PHONY: hops
hops: ## the functions and files that one TLS connection passes, from accept to the Relay: docs/internals/adr/0014-functions-on-the-way-of-a-connection.md
	cd integration && $(GO) build -cover -covermode=atomic -coverpkg=culvert.dev/... -o ../bin/hops ./hops
	@rm -rf bin/hops-coverage && mkdir bin/hops-coverage
	GOCOVERDIR=bin/hops-coverage bin/hops $(HOPSFLAGS)

.PHONY: scale
scale: build ## as many idle tunnels as twelve processes can hold, and what a million takes: docs/guides/scale.md
	cd integration && $(GO) run ./bench -culvert ../$(BIN) -scale 12 -o ../docs/guides/scale.md
