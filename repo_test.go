// Package culvert_test holds the rules of the tree: which way imports point,
// and where each heavy dependency may stand.
package culvert_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "culvert.dev"

// layers says what each folder may import from this module, and why. A folder
// that is not listed may import nothing of it: a new one is added here, with
// its reason.
var layers = []struct {
	folder string
	may    []string
	why    string
}{
	{"tunnel", []string{"tunnel/internal/poll", "tunnel/internal/relay"}, "the vocabulary stands on the standard library alone, so that everything can stand on it"},
	{"tunnel/internal/poll", nil, "waiting for sockets has nothing to do with what is carried"},
	{"tunnel/internal/relay", []string{"tunnel/internal/poll"}, "carrying bytes has nothing to do with whose they are"},
	{".", []string{"dns", "identity", "internal/gateway", "registry", "reverse", "tunnel"}, "the library is the composition of a gateway, in the process of a program that asks or serves"},
	{"tunnel/tunneltest", []string{"tunnel"}, "conformance suites are of the seams, not of what is behind them"},
	{"sni", []string{"tunnel"}, "a protocol knows the seams and no other protocol"},
	{"connect", []string{"internal/records", "tunnel"}, "a protocol knows the seams and no other protocol"},
	{"connect/connecttest", []string{"connect", "internal/testnet", "tunnel", "tunnel/tunneltest"}, "the tests of any version know no version"},
	{"connect/h2", []string{"connect", "connect/internal/mux", "internal/records", "tunnel"}, "a carrier of CONNECT shares its rules and answers, and knows no other carrier"},
	{"connect/h3", []string{"connect", "connect/internal/mux", "internal/race", "tunnel"}, "a carrier of CONNECT shares its rules and answers, and knows no other carrier"},
	{"connect/connectudp", []string{"connect", "tunnel"}, "datagrams on the streams of any carrier, which are given to it"},
	{"connect/internal/mux", []string{"connect", "tunnel"}, "what HTTP/2 and HTTP/3 share knows the rules of CONNECT and neither's frames"},
	{"connect/hbone", []string{"connect", "connect/h2", "identity", "internal/records", "tunnel"}, "HBONE is CONNECT over HTTP/2 with more to say, and knows no other carrier"},
	{"connect/proxyproto", []string{"tunnel"}, "a protocol knows the seams and no other protocol"},
	{"connect/socks5", []string{"tunnel"}, "a protocol knows the seams and no other protocol"},
	{"connect/ssh", []string{"connect", "connect/internal/mux", "identity/sshkeys", "reverse", "tunnel"}, "channels of SSH are refused in the words of CONNECT and charged like its streams, and names that clients serve are those of reverse sessions"},
	{"connect/ws", []string{"connect", "tunnel"}, "another way to begin a stream by an HTTP request"},
	{"identity", []string{"tunnel"}, "keys, bundles and whom a certificate names; where they come from is a source's business"},
	{"identity/files", []string{"identity", "internal/background", "internal/filewatch"}, "a source of keys and bundles knows no other source"},
	{"identity/sshkeys", []string{"identity", "tunnel"}, "whom a key names, whoever asks for it"},
	{"identity/spiffe", []string{"identity"}, "a source of keys and bundles knows no other source"},
	{"identity/spiffe/spiffetest", []string{"internal/testca"}, "an agent for tests issues what its CA signs"},
	{"identity/bundle", []string{"identity", "internal/statefile", "internal/wallclock"}, "a source of bundles knows no other source"},
	{"identity/jwt", []string{"connect", "identity", "internal/wallclock", "tunnel"}, "tokens are credentials of CONNECT, and their keys may be those of a trust domain"},
	{"policy", []string{"tunnel"}, "who may do what is decided by a request; where policies come from is a source's business"},
	{"delegation", nil, "services import it, too, and want nothing of a gateway's"},
	{"policy/policytest", []string{"policy", "tunnel"}, "worlds for tests are made of policies and requests"},
	{"internal/termination", []string{"identity", "internal/records", "tunnel"}, "what is inside of TLS is given to it, and so is who reads the hello"},
	{"internal/postgres", []string{"tunnel"}, "how PostgreSQL begins TLS; what reads the hello is given to it"},
	{"internal/udp", []string{"tunnel"}, "datagrams are decided by the same seams; what reads them is given to it"},
	{"registry", []string{"internal/background", "policy", "tunnel"}, "the table answers requests; where it comes from is a source's business"},
	{"registry/checks", []string{"internal/background", "registry", "tunnel"}, "a check knows the table and how to dial"},
	{"registry/file", []string{"identity", "identity/sshkeys", "internal/background", "internal/edits", "internal/filewatch", "policy", "registry", "tunnel"}, "a source knows the table and no other source"},
	{"registry/alloc", []string{"internal/statefile", "registry", "tunnel"}, "assigning ports and addresses to services needs arithmetic and a file, and nothing else"},
	{"registry/snapshot", []string{"internal/background", "internal/statefile", "policy", "registry", "tunnel"}, "the snapshots of a source are saved whatever source it is"},
	{"reverse", []string{"internal/statefile", "policy", "registry", "connect", "connect/h2", "tunnel"}, "sessions of connectors are asked by the table, and speak one carrier whichever they came by"},
	{"nat", []string{"internal/wallclock"}, "what is asked of routers and STUN servers has nothing to do with what is behind the ports"},
	{"nat/upnp", []string{"nat"}, "one way of asking, with the library it needs"},
	{"internal/invitation", []string{"connect", "connect/h2", "internal/statefile", "tunnel"}, "tokens, and the streams on which they are used; what a token is for is decided by its users"},
	{"identity/enroll", []string{"identity", "identity/bundle", "internal/invitation", "internal/statefile", "internal/wallclock", "tunnel"}, "issues and renews the identities of devices; what a device does with its identity is decided elsewhere"},
	{"registry/peer/join", []string{"identity", "identity/bundle", "internal/invitation", "registry", "registry/peer", "tunnel"}, "how a site becomes a peer: tokens, keys and a stream; what peers exchange then is not its business"},
	{"registry/peer", []string{"internal/background", "policy", "registry", "registry/snapshot", "tunnel"}, "a source knows the table and no other source; how a peer is dialed is given to it"},
	{"internal/names", []string{"dns", "registry", "tunnel"}, "the table in the words of DNS; neither knows the other"},
	{"dns", []string{"internal/wallclock", "tunnel"}, "the DNS library behind small interfaces of its own"},
	{"internal/metrics", []string{"tunnel"}, "metrics are made from Outcomes and nothing else"},
	{"internal/unixsocket", []string{"tunnel"}, "whom a socket lets in, and who came, has nothing to do with what is served there"},
	{"internal/activation", nil, "which sockets are passed has nothing to do with what is served there"},
	{"internal/localuser", []string{"internal/unixsocket", "tunnel"}, "whose connection it is has nothing to do with what is served there"},
	{"internal/capture", []string{"internal/capture/nft", "internal/capture/route", "tunnel"}, "which connections are captured, and the protocol of those; where they go is decided by the seams"},
	{"internal/isolate", []string{"internal/capture", "internal/capture/route"}, "a network for one program, in which all is captured; who serves its sockets is not its business"},
	{"internal/capture/route", nil, "routes know nothing of what is routed"},
	{"internal/capture/nft", nil, "how the kernel is told of rules has nothing to do with what they are for"},
	{"internal/admin", []string{"internal/unixsocket", "tunnel"}, "the admin port is given what it shows"},
	{"internal/records", nil, "how TLS records leave has nothing to do with what is in them"},
	{"internal/wallclock", nil, "what time has passed has nothing to do with for what"},
	{"internal/statefile", nil, "how a file is written has nothing to do with what is in it"},
	{"internal/race", []string{"tunnel"}, "which address answers first has nothing to do with what is dialed"},
	{"internal/background", nil, "a thread runs whatever computation it is given"},
	{"internal/edits", nil, "how alike two words are is arithmetic"},
	{"internal/testca", nil, "certificates know nothing of tunnels"},
	{"internal/testnet", []string{"tunnel"}, "test servers and chaos for any carrier"},
	{"internal/kubeconfig", nil, "a file of kubectl's, without Kubernetes; what leads to its servers is not its business"},
	{"internal/kube", []string{"internal/kube/client", "internal/kube/discovery", "internal/kube/endpoints", "internal/kube/gatewayapi", "internal/kube/imported", "internal/kube/mcs", "internal/kube/policy", "internal/kube/watch", "registry", "registry/snapshot"}, "the composition of what speaks to the API server; client-go goes no further"},
	{"internal/kube/client", nil, "where the API server is has nothing to do with what is asked of it"},
	{"internal/kube/watch", []string{"internal/kube/client"}, "what is known of Kubernetes, and how well, has nothing to do with what is made of it"},
	{"internal/kube/annotations", []string{"registry", "tunnel"}, "what an annotation says has nothing to do with how its object is found"},
	{"internal/kube/endpoints", []string{"internal/kube/client", "internal/kube/watch", "policy", "tunnel"}, "endpoints are kept once, and chosen by the same rules, for whoever asks"},
	{"internal/kube/gatewayapi", []string{"internal/background", "internal/kube/annotations", "internal/kube/client", "internal/kube/endpoints", "internal/kube/watch", "registry", "tunnel"}, "a source knows the table and no other source"},
	{"internal/kube/discovery", []string{"internal/background", "internal/kube/annotations", "internal/kube/client", "internal/kube/endpoints", "internal/kube/watch", "registry", "tunnel"}, "a source knows the table and no other source"},
	{"internal/kube/policy", []string{"internal/kube/client", "internal/kube/watch", "policy", "registry", "tunnel"}, "a source knows the table and no other source"},
	{"internal/kube/imported", []string{"internal/kube/client", "internal/kube/watch", "registry", "registry/alloc"}, "the composition gives the source its imports; ports are assigned as for all services"},
	{"internal/kube/mcs", []string{"internal/kube/client", "internal/kube/watch", "registry"}, "exports are found and imports written; discovery is told by who wires them"},
	{"internal/gateway/upstream", []string{"identity", "delegation", "connect", "connect/connectudp", "connect/h2", "connect/h3", "connect/hbone", "connect/proxyproto", "connect/socks5", "connect/ws", "internal/postgres", "internal/race", "registry", "internal/termination", "tunnel"}, "the one place where a carrier becomes a dialer; what is served is not its business"},
	{"internal/gateway/inbound", []string{"internal/activation", "identity", "delegation", "connect", "connect/connectudp", "connect/h2", "connect/h3", "connect/hbone", "connect/proxyproto", "connect/socks5", "connect/ssh", "connect/ws", "identity/jwt", "identity/sshkeys", "internal/capture", "internal/localuser", "internal/postgres", "internal/termination", "internal/udp", "internal/unixsocket", "registry", "reverse", "sni", "tunnel"}, "the one place where a listener gets its protocols; what is dialed is not its business"},
	{"internal/gateway", []string{"internal/activation", "identity", "internal/background", "internal/admin", "connect", "connect/h2", "connect/h3", "connect/hbone", "connect/socks5", "connect/ws", "dns", "identity/jwt", "internal/gateway/inbound", "internal/gateway/upstream", "internal/edits", "internal/metrics", "internal/names", "nat", "policy", "registry", "registry/alloc", "registry/checks", "registry/peer", "registry/peer/join", "identity/enroll", "reverse", "sni", "internal/termination", "tunnel", "internal/udp", "internal/unixsocket"}, "the composition; what it is made of does not know it"},
	{"deploy", nil, "manifests know nothing of the program that they start"},
	{"cmd/culvert", []string{"*"}, "wiring belongs in cmd"},
}

// homes names the folder that may import a heavy dependency, or several with spaces between
// them; "internal/kube/..." is any below internal/kube.
var homes = map[string]string{
	"github.com/spf13/cobra":              "cmd/culvert/command",
	"github.com/go-jose/go-jose/v4":       "identity/jwt delegation", // tokens of issuers, and assertions between gateways and services
	"github.com/prometheus/client_golang": "internal/metrics",
	"github.com/pires/go-proxyproto":      "connect/proxyproto",
	"github.com/miekg/dns":                "dns",
	"golang.org/x/net/ipv4":               "dns",
	"golang.org/x/net/ipv6":               "dns",
	"go.yaml.in/yaml":                     "registry/file internal/kubeconfig", // both keep the nodes: for positions, and for what is not theirs
	"sigs.k8s.io/yaml":                    "deploy",                            // the one that Helm writes with: a sum of its output is the same
	"github.com/fsnotify/fsnotify":        "internal/filewatch",
	"golang.org/x/net/idna":               "registry/file",
	"golang.org/x/crypto/cryptobyte":      "sni",
	"golang.org/x/sys/cpu":                "connect/ssh",                                                                                         // whether the processor has AES
	"golang.org/x/sys/windows":            "internal/statefile",                                                                                  // LockFileEx, which syscall lacks
	"golang.org/x/sys/unix":               "internal/unixsocket internal/localuser internal/capture/nft internal/capture/route internal/hostdns", // sock_diag; LOCAL_PEERCRED of macOS, which syscall lacks; the numbers of netlink
	"github.com/godbus/dbus/v5":           "internal/hostdns",                                                                                    // settings of systemd-resolved; another program that does it, resolvectl, is not in every image
	"golang.org/x/net/http2":              "connect/h2",
	"github.com/quic-go/quic-go":          "connect/h3",
	"github.com/quic-go/qpack":            "connect/h3",
	"golang.org/x/crypto/ssh":             "connect/ssh identity/sshkeys", // the protocol, and what its keys are called
	"golang.org/x/crypto/bcrypt":          "internal/gateway/inbound",
	"github.com/rogpeppe/go-internal":     "cmd/culvert/command",
	"github.com/spiffe/go-spiffe":         "identity/spiffe/...",
	"google.golang.org/grpc":              "identity/spiffe/...", // the Workload API speaks it
	"k8s.io":                              "internal/kube/...",
	"sigs.k8s.io":                         "internal/kube/...",
	"github.com/huin/goupnp":              "nat/upnp",
	"go.uber.org/goleak":                  "*", // tests only, checked below
	"golang.org/x/net/nettest":            "*",
	"github.com/prometheus/client_model":  "internal/metrics",
	"github.com/prometheus/common":        "internal/metrics",
}

// testOnly dependencies never reach the program.
var testOnly = []string{"go.uber.org/goleak", "golang.org/x/net/nettest", "github.com/rogpeppe/go-internal", module + "/tunnel/tunneltest", module + "/connect/connecttest", module + "/identity/spiffe/spiffetest", module + "/policy/policytest", module + "/internal/testnet"}

func TestImportsPointOneWay(t *testing.T) {
	eachFile(t, func(path string, imports []string) {
		folder := filepath.ToSlash(filepath.Dir(path))
		test := strings.HasSuffix(path, "_test.go")
		for _, imp := range imports {
			inside, ours := strings.CutPrefix(imp, module+"/")
			if ours && !test && inside != folder && !allowed(folder, inside) {
				t.Errorf("%s imports %s: %s", path, imp, reason(folder))
			}
			if home, ok := homeOf(imp); ok && home != folder && !isHome(home, folder) && !test {
				t.Errorf("%s imports %s, which only %s may import", path, imp, home)
			}
			for _, dep := range testOnly {
				suite := slices.Contains([]string{"tunnel/tunneltest", "connect/connecttest", "internal/testnet"}, folder)
				if (imp == dep || strings.HasPrefix(imp, dep+"/")) && !test && !suite {
					t.Errorf("%s imports %s, which is for tests only", path, imp)
				}
			}
		}
	})
}

// Every third-party import has a home, so that a new dependency is a decision.
func TestDependenciesHaveAHome(t *testing.T) {
	eachFile(t, func(path string, imports []string) {
		for _, imp := range imports {
			first, _, _ := strings.Cut(imp, "/")
			if !strings.Contains(first, ".") || strings.HasPrefix(imp, module) {
				continue
			}
			known := false
			for dep := range homes {
				known = known || imp == dep || strings.HasPrefix(imp, dep+"/")
			}
			if !known {
				t.Errorf("%s imports %s, which has no home in repo_test.go", path, imp)
			}
		}
	})
}

func TestNoInitFunctions(t *testing.T) {
	eachFile(t, func(path string, _ []string) {
		src, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(src), "\nfunc "+"init()") {
			t.Errorf("%s has an init function: wiring belongs in cmd", path)
		}
	})
}

func allowed(folder, imp string) bool {
	for _, l := range layers {
		if l.folder != folder && !strings.HasPrefix(folder, l.folder+"/") || l.folder != folder && isListed(folder) {
			continue
		}
		for _, m := range l.may {
			if m == "*" || m == imp || strings.HasPrefix(imp, m+"/") && !isListed(imp) {
				return true
			}
		}
	}
	return false
}

// homeOf returns the home of an import: that of the longest dependency it is of.
func homeOf(imp string) (home string, ok bool) {
	longest := ""
	for dep, h := range homes {
		if (imp == dep || strings.HasPrefix(imp, dep+"/")) && len(dep) > len(longest) {
			longest, home, ok = dep, h, true
		}
	}
	return home, ok
}

func isHome(home, folder string) bool {
	if two := strings.Fields(home); len(two) > 1 {
		return slices.Contains(two, folder)
	}
	if tree, ok := strings.CutSuffix(home, "..."); ok {
		return strings.HasPrefix(folder+"/", tree)
	}
	return home == "*"
}

func isListed(folder string) bool {
	for _, l := range layers {
		if l.folder == folder {
			return true
		}
	}
	return false
}

func reason(folder string) string {
	for _, l := range layers {
		if l.folder == folder {
			return l.why
		}
	}
	return folder + " is not listed in repo_test.go"
}

// eachFile calls f for every Go file of this module but generated and fixture ones.
func eachFile(t *testing.T, f func(path string, imports []string)) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "." {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") {
				return filepath.SkipDir
			}
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		var imports []string
		for _, i := range file.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return err
			}
			imports = append(imports, p)
		}
		f(path, imports)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// public are the packages that another program may want. Each has an example that
// runs as a test, and says in its documentation how stable its API is.
var public = []string{
	".", "tunnel", "sni", "connect", "connect/h2", "connect/h3", "connect/hbone", "connect/proxyproto", "connect/socks5", "connect/ssh", "connect/ws", "delegation", "policy", "registry", "dns",
}

func TestPublicPackages(t *testing.T) {
	for _, folder := range public {
		doc, err := os.ReadFile(filepath.Join(folder, "doc.go"))
		if err != nil {
			t.Error(err)
			continue
		}
		if !strings.Contains(string(doc), "\n// # Stability\n") {
			t.Errorf("%s/doc.go has no section \"Stability\"", folder)
		}
		examples, err := filepath.Glob(filepath.Join(folder, "example*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, name := range examples {
			src, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			found = found || strings.Contains(string(src), "\nfunc Example") && strings.Contains(string(src), "// Output:")
		}
		if !found {
			t.Errorf("%s has no example whose output is compared", folder)
		}
	}
}
