package culvert_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// socketMakers are what opens sockets that begin connections, by package. An agent that captures
// connections gives its own sockets a mark; one without it would be captured and lead the agent to
// itself. So tunnel.Sockets opens them all.
var socketMakers = map[string][]string{
	"net": {
		"Dial", "DialTimeout", "DialTCP", "DialUDP", "DialIP", "DialUnix", "Dialer",
		"ListenPacket", "ListenUDP", "ListenIP", "ListenMulticastUDP", "ListenUnixgram",
		"DefaultResolver", "Resolver", "LookupHost", "LookupIP", "LookupAddr", "LookupCNAME", "LookupMX", "LookupNS", "LookupSRV", "LookupTXT",
	},
	"net/http":                    {"DefaultTransport", "DefaultClient", "Get", "Head", "Post", "PostForm", "Transport"},
	"crypto/tls":                  {"Dial", "DialWithDialer", "Dialer"},
	"syscall":                     {"Socket", "SYS_SOCKET"},
	"golang.org/x/sys/unix":       {"Socket", "SYS_SOCKET"},
	"github.com/quic-go/quic-go":  {"DialAddr", "DialAddrEarly", "ListenAddr", "ListenAddrEarly"},
	"google.golang.org/grpc":      {"Dial", "DialContext", "NewClient"},
	"github.com/miekg/dns":        {"Client", "Dial", "DialTimeout", "DialTimeoutWithTLS", "DialWithTLS", "Exchange", "ExchangeContext"},
	"k8s.io/client-go/rest":       {"InClusterConfig"},
	"golang.org/x/crypto/ssh":     {"Dial"},
	"github.com/huin/goupnp":      {"DiscoverDevices", "DiscoverDevicesCtx", "DeviceByURL", "DeviceByURLCtx"},
	"github.com/huin/goupnp/soap": {"NewSOAPClient"},
}

// socketOwners are the files that may open such sockets, and why.
var socketOwners = map[string]string{
	"tunnel/sockets.go":                      "the owner",
	"tunnel/internal/poll/dial_linux.go":     "gives the socket the mark that it is told",
	"tunnel/internal/poll/dialnet.go":        "gives the socket the mark that it is told",
	"connect/dialer.go":                      "for other programs; a gateway gives its own Dialer",
	"connect/socks5/dialer.go":               "for other programs; a gateway gives its own Dialer",
	"connect/h2/dialer.go":                   "for other programs; a gateway gives its own Dialer",
	"connect/hbone/dialer.go":                "for other programs; a gateway gives its own Dialer",
	"connect/h3/dialer.go":                   "for other programs; a gateway gives its own Lookup",
	"connect/h3/rawquic.go":                  "a client of tests",
	"nat/natpmp.go":                          "for other programs; a gateway gives its own Dial",
	"nat/seen.go":                            "for other programs; a gateway gives its own Lookup",
	"nat/route.go":                           "asks the kernel for a route; nothing is sent",
	"nat/announce.go":                        "hears what routers announce; nothing is sent",
	"nat/upnp/upnp.go":                       "gives its sockets the Control that it is told",
	"identity/bundle/endpoint.go":            "dials by Source.Dial; a net.Dialer's is for other programs",
	"identity/jwt/source.go":                 "dials by Tokens.Dial",
	"identity/spiffe/source.go":              "the Workload API is asked at a Unix socket, or at this host",
	"internal/kube/client/client.go":         "dials by Config.Dial",
	"internal/udp/listen.go":                 "listens, and answers clients",
	"internal/isolate/enter_linux.go":        "listens in a network of its own",
	"internal/hostdns/device_linux.go":       "sets up an interface; nothing is sent",
	"internal/unixsocket/socket.go":          "Unix sockets alone",
	"internal/unixsocket/bind_unix.go":       "Unix sockets alone",
	"internal/localuser/user_linux.go":       "netlink",
	"internal/capture/route/route_linux.go":  "netlink",
	"internal/capture/nft/conn.go":           "netlink",
	"cmd/culvert/command/notify.go":          "a Unix socket",
	"cmd/culvert/command/agentdialer.go":     "a process of its own, which asks the agent of this host",
	"cmd/culvert/command/adminclient.go":     "a process of its own, which asks the gateway of this host",
	"cmd/culvert/command/doctor.go":          "a process of its own, which sees what programs see",
	"cmd/culvert/command/doctor_gateway.go":  "a process of its own, which sees what programs see",
	"cmd/culvert/command/doctor_host.go":     "a process of its own, which sees what programs see",
	"cmd/culvert/command/upstreamproxy.go":   "a process of its own, before there is an agent",
	"cmd/culvert/command/probe.go":           "a process of its own, which sees what programs see",
	"cmd/culvert/command/probe_datagrams.go": "a process of its own, which sees what programs see",
	"cmd/culvert/command/demo_ways.go":       "a demonstration on loopback",
	"cmd/culvert/command/demo_services.go":   "a demonstration on loopback",
}

// Every socket that begins a connection is one of tunnel.Sockets.
func TestSocketsHaveAnOwner(t *testing.T) {
	used := map[string]bool{}
	eachFile(t, func(file string, imports []string) {
		file = filepath.ToSlash(file)
		folder := path.Dir(file)
		if strings.HasSuffix(file, "_test.go") || slices.ContainsFunc(testOnly, func(dep string) bool {
			return strings.HasPrefix(module+"/"+folder+"/", dep+"/")
		}) {
			return
		}
		for _, what := range makersIn(t, file) {
			if socketOwners[file] == "" {
				t.Errorf("%s: %s opens sockets that have no mark: take them from tunnel.Sockets, or say in socketOwners why not", file, what)
			}
			used[file] = true
		}
	})
	for _, file := range slices.Sorted(maps.Keys(socketOwners)) {
		if !used[file] {
			t.Errorf("%s opens no sockets: take it out of socketOwners", file)
		}
	}
}

// makersIn returns what a file uses of socketMakers, with its line.
func makersIn(t *testing.T, file string) (found []string) {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, filepath.FromSlash(file), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	packages := map[string]string{} // by what the file calls them
	for _, i := range f.Imports {
		p, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		name := path.Base(p)
		switch {
		case i.Name != nil:
			name = i.Name.Name
		case p == "github.com/quic-go/quic-go":
			name = "quic"
		}
		packages[name] = p
	}
	line := func(n ast.Node) string { return " in line " + strconv.Itoa(fset.Position(n.Pos()).Line) }
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CompositeLit:
			if isSelector(n.Type, packages, "net/http", "Client") && !hasKey(n, "Transport") {
				found = append(found, "http.Client without a Transport"+line(n))
			}
		case *ast.SelectorExpr:
			x, named := n.X.(*ast.Ident)
			if named && slices.Contains(socketMakers[packages[x.Name]], n.Sel.Name) {
				found = append(found, x.Name+"."+n.Sel.Name+line(n))
			} else if n.Sel.Name == "ListenPacket" && !isSockets(n.X) { // of a net.ListenConfig
				found = append(found, "ListenPacket"+line(n))
			}
		}
		return true
	})
	return found
}

// isSelector reports whether e is a name of a package.
func isSelector(e ast.Expr, packages map[string]string, pkg, name string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != name {
		return false
	}
	x, ok := sel.X.(*ast.Ident)
	return ok && packages[x.Name] == pkg
}

func hasKey(lit *ast.CompositeLit, key string) bool {
	return slices.ContainsFunc(lit.Elts, func(e ast.Expr) bool {
		kv, ok := e.(*ast.KeyValueExpr)
		if !ok {
			return false
		}
		k, ok := kv.Key.(*ast.Ident)
		return ok && k.Name == key
	})
}

// isSockets reports whether e is a tunnel.Sockets, by what it is called.
func isSockets(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name == "sockets"
	case *ast.SelectorExpr:
		return e.Sel.Name == "Sockets" || e.Sel.Name == "sockets"
	}
	return false
}
