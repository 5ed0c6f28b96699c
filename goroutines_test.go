package culvert_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// outside are the packages that read what strangers send, or that serve who
// reads it.
var outside = []string{
	"internal/admin", "connect", "connect/connectudp", "connect/internal/mux", "connect/h2", "connect/h3", "connect/hbone", "connect/proxyproto", "connect/socks5", "connect/ws", "dns", "identity/jwt", "identity/spiffe", "internal/gateway", "internal/gateway/inbound", "internal/gateway/upstream", "internal/names", "identity/bundle", "nat", "nat/upnp",
	"registry", "registry/checks", "registry/peer", "registry/peer/join", "internal/invitation", "identity/enroll", "reverse", "sni", "internal/termination", "tunnel", "tunnel/internal/poll", "tunnel/internal/relay", "internal/udp",
}

// uncaught are the goroutines of these packages that do not recover by
// themselves, by the function that starts them, and why that is right.
var uncaught = map[string]string{
	"internal/admin/accesslog.go AccessLog.admit":                         "writes lines that are made",
	"internal/admin/admin.go Admin.Serve":                                 "net/http recovers for each request",
	"internal/admin/async.go NewAsyncWriter":                              "writes lines that are made",
	"connect/internal/mux/pool.go Pool.start":                             "run recovers, and the rest is the pool's own list",
	"dns/forward.go Forwarder.startFlight":                                "settle recovers, and the rest is the list of flights",
	"dns/https.go Server.ServeHTTPS":                                      "waits for the end; net/http recovers for each request",
	"dns/targets.go Server.join":                                          "safeLookup recovers, and the rest is the list of lookups",
	"dns/tcp.go Server.serveStreams":                                      "serveStream recovers",
	"dns/tcp.go stream.next":                                              "finish recovers, and what is left is to write the answer",
	"dns/udp.go Server.ServeUDP":                                          "begin and done recover for each message, and what is left is to write the answer",
	"dns/udp.go udpServer.read":                                           "finish and done recover, and what is left is to write the answer",
	"identity/jwt/tokens.go Tokens.Run":                                   "fetch recovers, and the rest is the list of those that wait",
	"identity/bundle/serve.go Server.Serve":                               "stops a server",
	"identity/bundle/source.go Source.Run":                                "ask recovers, and the rest compares times",
	"identity/spiffe/source.go Source.Run":                                "read recovers, and the rest compares times",
	"identity/spiffe/token.go Source.Token":                               "fetchToken recovers, and the rest compares times",
	"internal/gateway/inbound/datagrams.go Socket.Serve":                  "runs a server, which recovers for each connection",
	"internal/gateway/http3.go http3Sockets.shutdown":                     "stops servers",
	"internal/gateway/connector.go connector.run":                         "it waits for a client, whose sessions recover",
	"internal/gateway/gateway.go Gateway.Run":                             "runs a server, which recovers for each connection",
	"internal/gateway/drain.go Gateway.drain":                             "stops servers",
	"nat/announce.go announcements.start":                                 "hear recovers",
	"nat/upnp/upnp.go Finder.find":                                        "sends searches, and reads nothing",
	"registry/checks/checker.go Checker.start":                            "ask recovers, and the rest hands on its result",
	"internal/gateway/upstream/fallback.go fallbackAttempt.check":         "it compares results of handshakes, whose goroutines recover",
	"internal/gateway/upstream/fallback_probe.go FallbackDialer.schedule": "it compares times, and the probe that it starts recovers",
	"registry/peer/peers.go Peers.Run":                                    "hands on updates, and what makes them recovers",
	"registry/peer/dial.go peer.Run":                                      "it waits between attempts, each of which recovers",
	"registry/peer/session.go session.run":                                "closes a stream; what reads and writes it recovers",
	"registry/peer/session.go session.send":                               "closes a stream",
	"registry/run.go Registry.Run":                                        "runs sources of configuration, whose panic runSafely catches",
	"registry/run.go runningGroup.run":                                    "the same",
	"registry/run.go runSource":                                           "runSafely recovers",
	"tunnel/internal/relay/loop_linux.go Loops.running":                   "a loop moves bytes and parses none; hasPreamble, which does, recovers, and so does serve",
	"tunnel/internal/poll/loop_linux.go Task.detach":                      "a loop goes on in another goroutine",
	"tunnel/internal/relay/copy.go copyRelay.open":                        "the sweep guards what it does with each tunnel",
	"tunnel/internal/relay/pump.go pump.start":                            "run guards what it calls",
	"tunnel/internal/relay/pump.go pump.wake":                             "run guards what it calls",
	"tunnel/internal/relay/pump_linux.go pump.push":                       "run guards what it calls",
	"tunnel/server.go Server.admit":                                       "the sweep compares times, and ends connections by a lock of their own",
	"internal/udp/session.go activeListener.admit":                        "the sweep compares times, and recovers for each session that it ends",
}

// TestGoroutinesRecover: a panic in a goroutine ends the process, so each one
// that what a stranger sends can reach recovers, and ends its own connection.
// What starts one is a go statement, a method Go, or AfterFunc.
func TestGoroutinesRecover(t *testing.T) {
	used := map[string]bool{}
	for _, folder := range outside {
		pkg := parseFolder(t, folder)
		for file, f := range pkg.files {
			for _, d := range f.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok || fn.Body == nil {
					continue
				}
				key := file + " " + nameOf(fn)
				ast.Inspect(fn.Body, func(n ast.Node) bool {
					started := startedBy(n)
					if started == nil || pkg.recovers(started) {
						return true
					}
					used[key] = true
					if uncaught[key] == "" {
						t.Errorf("%s starts a goroutine that does not recover: a panic in it ends the process", key)
					}
					return true
				})
			}
		}
	}
	for key := range uncaught {
		if !used[key] {
			t.Errorf("%s is in the list of those that do not recover, and starts no such goroutine", key)
		}
	}
}

// A parsed is a package without its tests.
type parsed struct {
	files map[string]*ast.File
	funcs map[string][]*ast.FuncDecl // by name, whatever they are methods of
}

func parseFolder(t *testing.T, folder string) *parsed {
	t.Helper()
	p := &parsed{map[string]*ast.File{}, map[string][]*ast.FuncDecl{}}
	names, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil || len(names) == 0 {
		t.Fatalf("%s: no files, %v", folder, err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, src, 0)
		if err != nil {
			t.Fatal(err)
		}
		p.files[filepath.ToSlash(name)] = f
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				p.funcs[fn.Name.Name] = append(p.funcs[fn.Name.Name], fn)
			}
		}
	}
	return p
}

// nameOf is that of a function, with the type that it is a method of.
func nameOf(fn *ast.FuncDecl) string {
	if fn.Recv == nil {
		return fn.Name.Name
	}
	of := fn.Recv.List[0].Type
	for {
		switch x := of.(type) {
		case *ast.StarExpr:
			of = x.X
		case *ast.IndexExpr:
			of = x.X
		case *ast.Ident:
			return x.Name + "." + fn.Name.Name
		default:
			return fn.Name.Name
		}
	}
}

// startedBy returns the function that n runs in a goroutine, nil for none.
func startedBy(n ast.Node) ast.Expr {
	switch n := n.(type) {
	case *ast.GoStmt:
		return n.Call.Fun
	case *ast.CallExpr:
		sel, ok := n.Fun.(*ast.SelectorExpr)
		if ok && (sel.Sel.Name == "Go" && len(n.Args) == 1 || sel.Sel.Name == "AfterFunc" && len(n.Args) == 2) {
			return n.Args[len(n.Args)-1]
		}
	}
	return nil
}

// harmless are what goroutines do that wait for others or wake them, by name.
var harmless = []string{"Add", "Broadcast", "Close", "CloseWithError", "Done", "Lock", "SetDeadline", "SetReadDeadline", "SetWriteDeadline", "Unix", "Unlock", "Wait", "cancel", "close", "wake"}

// recovers reports whether a function recovers: it is a literal, or one of the
// package, that defers what does. A method stands for all of its name. One that
// does harmless things has nothing to recover from.
func (p *parsed) recovers(f ast.Expr) bool {
	lit, ok := f.(*ast.FuncLit)
	if ok {
		return p.defers(lit.Body) || onlyHarmless(lit.Body)
	}
	if slices.Contains(harmless, called(f)) {
		return true
	}
	return slices.ContainsFunc(p.funcs[called(f)], func(fn *ast.FuncDecl) bool { return fn.Body != nil && p.defers(fn.Body) })
}

func onlyHarmless(body *ast.BlockStmt) bool {
	only := true
	ast.Inspect(body, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			only = only && slices.Contains(harmless, called(call.Fun))
		}
		return only
	})
	return only
}

func called(f ast.Expr) string {
	switch f := f.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		return f.Sel.Name
	}
	return ""
}

// defers reports whether a body defers a call of recover, or of a function of
// the package that calls it.
func (p *parsed) defers(body *ast.BlockStmt) bool {
	for _, stmt := range body.List {
		d, ok := stmt.(*ast.DeferStmt)
		if !ok {
			continue
		}
		if lit, ok := d.Call.Fun.(*ast.FuncLit); ok {
			if callsRecover(lit.Body) {
				return true
			}
			continue
		}
		if slices.ContainsFunc(p.funcs[called(d.Call.Fun)], func(fn *ast.FuncDecl) bool { return fn.Body != nil && callsRecover(fn.Body) }) {
			return true
		}
	}
	return false
}

func callsRecover(body *ast.BlockStmt) bool {
	found := false
	ast.Inspect(body, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			id, ok := call.Fun.(*ast.Ident)
			found = found || ok && id.Name == "recover"
		}
		return !found
	})
	return found
}
