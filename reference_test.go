package culvert_test

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"culvert.dev/connect"
	"culvert.dev/connect/socks5"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

const generated = "<!-- Written by \"make docs\". Change the code, not this page. -->\n\n"

// TestReference compares the pages of docs/reference with the code they are
// made of. "make docs" writes them. The command line's page is compared in
// cmd/culvert/command.
func TestReference(t *testing.T) {
	for _, page := range []struct {
		name string
		text func(*testing.T) string
	}{
		{"configuration", configurationPage},
		{"metrics", metricsPage},
		{"log", logPage},
		{"reasons", reasonsPage},
	} {
		name := "docs/reference/" + page.name + ".md"
		want := page.text(t)
		if *update {
			if err := os.WriteFile(name, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if read(t, name) != want {
			t.Errorf("%s differs from the code that it is made of: run \"make docs\" and commit the page", name)
		}
	}
}

// configurationPage has a section for each object of the schema, under the path
// by which a file first reaches it.
func configurationPage(t *testing.T) string {
	t.Helper()
	p := schemaPage{path: map[string]string{}}
	if err := json.Unmarshal([]byte(read(t, "registry/file/schema.json")), &p.root); err != nil {
		t.Fatal(err)
	}
	p.find(p.root, "")
	var b strings.Builder
	b.WriteString("# Configuration\n\n" + generated + `Every key of the gateway's YAML file. [Running a gateway](../guides/gateway.md) explains them.
` + "`culvert config schema`" + ` prints the JSON schema for editors, and ` + "`culvert config check FILE`" + ` checks a
file. An unknown key, a name that is given twice or an address that cannot be parsed is an error:
the whole file is refused, with line, column and a hint, and the exit code is 2.

A duration is written as 30s, 5m or 1h30m. "Without it" in a description says what a key that is
left out means.

`)
	fmt.Fprintf(&b, "The file is read again when it changes. A running gateway takes up every key but %s:\nthese wait for a restart, and `culvert status` names those that do, with both values.\n\n", strings.Join(p.restartKeys(p.root, ""), ", "))
	p.section(&b, "culvert.yaml", p.root, p.keys(p.root))
	for _, def := range p.order {
		object := p.def(def)
		p.section(&b, p.path[def], object, p.keys(object))
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// A schemaPage makes a page of the schema.
type schemaPage struct {
	root  map[string]any
	order []string          // definitions of objects, as they are first met
	path  map[string]string // where that is
}

// keys returns an object's keys in the order of the file.
func (p *schemaPage) keys(object map[string]any) []string {
	properties := object["properties"].(map[string]any)
	first := []string{"name", "names", "address", "kind", "suffix", "zone", "service", "certificateFile", "keyFile"}
	keys := slices.Sorted(maps.Keys(properties))
	slices.SortStableFunc(keys, func(a, b string) int {
		rank := func(k string) int {
			if i := slices.Index(first, k); i >= 0 && !isRoot(object) {
				return i
			}
			return len(first)
		}
		return rank(a) - rank(b)
	})
	return keys
}

func isRoot(object map[string]any) bool { return object["$defs"] != nil }

func (p *schemaPage) def(name string) map[string]any {
	return p.root["$defs"].(map[string]any)[name].(map[string]any)
}

// find notes the objects below a key, in depth.
func (p *schemaPage) find(object map[string]any, at string) {
	for _, key := range p.keys(object) {
		p.below(object["properties"].(map[string]any)[key], strings.TrimPrefix(at+"."+key, "."))
	}
}

func (p *schemaPage) below(v any, at string) {
	s, ok := v.(map[string]any)
	if !ok {
		return
	}
	if ref, ok := s["$ref"].(string); ok {
		name := strings.TrimPrefix(ref, "#/$defs/")
		def := p.def(name)
		if def["properties"] == nil {
			p.below(def, at)
		} else if p.path[name] == "" {
			p.path[name] = at
			p.order = append(p.order, name)
			p.find(def, at)
		}
	}
	p.below(s["items"], at+"[]")
	p.below(s["additionalProperties"], at+".NAME")
	for _, word := range []string{"anyOf", "oneOf"} {
		some, _ := s[word].([]any)
		for _, one := range some {
			p.below(one, at)
		}
	}
}

// restartKeys returns the keys of which a change needs a restart, as code.
func (p *schemaPage) restartKeys(object map[string]any, at string) (keys []string) {
	for _, key := range p.keys(object) {
		s := object["properties"].(map[string]any)[key].(map[string]any)
		text, _ := s["description"].(string)
		ref, isRef := s["$ref"].(string)
		var def map[string]any
		if isRef {
			def = p.def(strings.TrimPrefix(ref, "#/$defs/"))
		}
		if below, _ := def["description"].(string); text == "" {
			text = below
		}
		switch {
		case strings.Contains(text, "A change needs a restart."):
			keys = append(keys, "`"+at+key+"`")
		case def["properties"] != nil:
			keys = append(keys, p.restartKeys(def, at+key+".")...)
		}
	}
	return keys
}

func (p *schemaPage) section(b *strings.Builder, title string, object map[string]any, keys []string) {
	fmt.Fprintf(b, "## %s\n\n", title)
	if text, ok := object["description"].(string); ok {
		b.WriteString(text + "\n\n")
	}
	required, _ := object["required"].([]any)
	b.WriteString("| key | value | default | meaning |\n| --- | --- | --- | --- |\n")
	for _, key := range keys {
		s := object["properties"].(map[string]any)[key].(map[string]any)
		def := "-"
		if v, ok := s["default"]; ok {
			def = code(v)
		} else if slices.Contains(required, any(key)) {
			def = "required"
		}
		meaning, _ := s["description"].(string)
		if ref, ok := s["$ref"].(string); ok && meaning == "" {
			meaning, _ = p.def(strings.TrimPrefix(ref, "#/$defs/"))["description"].(string)
		}
		fmt.Fprintf(b, "| `%s` | %s | %s | %s |\n", key, p.value(s), def, meaning)
	}
	b.WriteString("\n")
}

// code is a value as YAML has it.
func code(v any) string {
	if list, ok := v.([]any); ok {
		var all []string
		for _, e := range list {
			all = append(all, fmt.Sprint(e))
		}
		return "`[" + strings.Join(all, ", ") + "]`"
	}
	return fmt.Sprintf("`%v`", v)
}

// value says what a key takes.
func (p *schemaPage) value(s map[string]any) string {
	if ref, ok := s["$ref"].(string); ok {
		name := strings.TrimPrefix(ref, "#/$defs/")
		if p.path[name] != "" {
			return fmt.Sprintf("[object](#%s)", anchor(p.path[name]))
		}
		switch name {
		case "duration", "rest":
			return "duration"
		case "listenAddress", "adminAddress", "dnsAddress":
			return "address"
		}
		return p.value(p.def(name))
	}
	if words, ok := s["enum"].([]any); ok {
		var all []string
		for _, w := range words {
			if text := "`" + fmt.Sprint(w) + "`"; !slices.Contains(all, text) {
				all = append(all, text)
			}
		}
		return strings.Join(all, ", ")
	}
	for _, word := range []string{"anyOf", "oneOf"} {
		if some, ok := s[word].([]any); ok {
			var all []string
			for _, one := range some {
				all = append(all, p.value(one.(map[string]any)))
			}
			return strings.Join(all, " or ")
		}
	}
	var types []string
	switch v := s["type"].(type) {
	case string:
		types = []string{v}
	case []any:
		for _, e := range v {
			types = append(types, e.(string))
		}
	}
	var all []string
	for _, name := range types {
		switch name {
		case "string":
			name = "text"
		case "integer", "number":
			if slices.Contains(types, "string") {
				continue // a text that looks like a number
			}
			name = "number"
		case "boolean":
			name = "true or false"
		case "object":
			name = "map"
		case "array":
			name = "list"
			if items, ok := s["items"].(map[string]any); ok {
				name = "list of " + p.value(items)
			}
		}
		all = append(all, name)
	}
	return strings.Join(all, " or ")
}

// metricsPage has every metric that the code registers.
func metricsPage(t *testing.T) string {
	t.Helper()
	found := map[string]string{}
	eachFile(t, func(path string, _ []string) {
		if strings.HasSuffix(path, "_test.go") || servesTests(path) {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				if name, row := metricOf(call); name != "" {
					found[name] = row
				}
			}
			return true
		})
	})
	if len(found) < 40 {
		t.Fatalf("%d metrics, want at least 40: they are not found", len(found))
	}
	var b strings.Builder
	b.WriteString("# Metrics\n\n" + generated + "What `/metrics` serves, beside the metrics of the Go runtime and of the process.\n" +
		"[Running a gateway](../guides/gateway.md#what-to-watch) says which to watch.\n\n" +
		"| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n")
	for _, name := range slices.Sorted(maps.Keys(found)) {
		b.WriteString(found[name])
	}
	return b.String()
}

// metricOf returns the name and the row of the metric that a call registers.
func metricOf(call *ast.CallExpr) (name, row string) {
	kind := ""
	switch fun := call.Fun.(type) {
	case *ast.Ident:
		kind = fun.Name
	case *ast.SelectorExpr:
		kind = fun.Sel.Name
	}
	args := call.Args
	var help string
	if len(args) > 0 {
		if options, ok := args[0].(*ast.CompositeLit); ok { // prometheus.NewX(prometheus.XOpts{...}, labels)
			for _, e := range options.Elts {
				if kv, ok := e.(*ast.KeyValueExpr); ok {
					switch fmt.Sprint(kv.Key) {
					case "Name":
						name = literal(kv.Value)
					case "Help":
						help = literal(kv.Value)
					}
				}
			}
			args = args[1:]
		} else if name = literal(args[0]); len(args) > 1 {
			help = literal(args[1])
			args = args[2:]
		}
	}
	if !strings.HasPrefix(name, "culvert_") || help == "" {
		return "", ""
	}
	switch lower := strings.ToLower(kind); {
	case strings.Contains(lower, "histogram"):
		kind = "histogram"
	case strings.Contains(lower, "counter"):
		kind = "counter"
	default:
		kind = "gauge"
	}
	var labels []string
	for _, a := range args {
		elements := []ast.Expr{a}
		if list, ok := a.(*ast.CompositeLit); ok {
			if _, ok := list.Type.(*ast.ArrayType); !ok {
				continue
			}
			elements = list.Elts
		}
		for _, e := range elements {
			if text := literal(e); text != "" {
				labels = append(labels, "`"+text+"`")
			}
		}
	}
	return name, fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, kind, strings.Join(labels, ", "), help)
}

// literal returns the text of a string literal, and nothing for all else.
func literal(e ast.Expr) string {
	if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
		if text, err := strconv.Unquote(l.Value); err == nil {
			return text
		}
	}
	return ""
}

// logPage has the fields of a connection's line, by the comments of the code
// that writes them.
func logPage(t *testing.T) string {
	t.Helper()
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, filepath.Join("internal", "admin", "accesslog.go"), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	comments := map[int]string{}
	for _, c := range f.Comments {
		comments[fset.Position(c.Pos()).Line] = strings.TrimSpace(c.Text())
	}
	var rows strings.Builder
	n := 0
	ast.Inspect(f, func(node ast.Node) bool {
		if fun, ok := node.(*ast.FuncDecl); ok && fun.Name.Name != "fields" {
			return false
		}
		if call, ok := node.(*ast.CallExpr); ok && len(call.Args) > 1 {
			if key := literal(call.Args[0]); key != "" {
				n++
				meaning := comments[fset.Position(call.Pos()).Line]
				if meaning == "" {
					t.Errorf("the log field %q has no comment that says what it is", key)
				}
				fmt.Fprintf(&rows, "| `%s` | %s |\n", key, meaning)
			}
		}
		return true
	})
	if n < 15 {
		t.Fatalf("%d log fields, want at least 15: they are not found", n)
	}
	return "# Log\n\n" + generated + `The gateway writes one line for each connection, when it ends. The level is ` + "`info`" + `; ` + "`warn`" + ` where the
gateway or the service is at fault; ` + "`debug`" + ` where a client left without a byte. What clients sent is
escaped. Durations in JSON are nanoseconds. A field without a value is left out.

The message is ` + "`tunnel`" + ` for a connection that was carried, ` + "`refused`" + ` for a request that was refused,
and ` + "`left`" + ` for a client that disconnected before it made one.

| field | meaning |
| --- | --- |
` + rows.String() + `
At most ten ` + "`overload`" + ` refusals a second are logged. Then one line, ` + "`refusals not logged`" + `, has the
number of the others in ` + "`suppressed`" + `. The log never blocks a tunnel: if it is not read fast enough,
lines are dropped and counted in ` + "`culvert_log_lines_dropped_total`" + `, and a line marks the gap.
`
}

// reasonsPage has every Reason, by its comment, with what clients are told.
func reasonsPage(t *testing.T) string {
	t.Helper()
	source := read(t, "tunnel/outcome.go")
	var b strings.Builder
	b.WriteString("# Reasons\n\n" + generated + `A reason is the one word that says why a request was refused or how a tunnel ended. It is the same
in the log, the metrics, ` + "`Proxy-Status`" + ` and ` + "`culvert explain`" + `.

- TLS: the number of the alert that the client gets, or a plain close. With ` + "`refusal: close`" + ` it is
  always a close.
- CONNECT: the status and the error of RFC 9209, for a client that has shown valid credentials. All
  others get 403 ` + "`http_request_denied`" + ` for a service that does not exist, is private or is denied.
- SOCKS5: the reply of RFC 1928.

"reset" means that the connection is aborted, with RST where TCP carries it.

| reason | meaning | TLS | CONNECT | SOCKS5 | what to do |
| --- | --- | --- | --- | --- | --- |
`)
	for _, r := range tunnel.Reasons() {
		comment := regexp.MustCompile(`(?m)"` + string(r) + `" *// (.*)$`).FindStringSubmatch(source)
		if comment == nil || whatToDo[r] == "" {
			t.Errorf("the reason %q has no comment in tunnel/outcome.go, or nothing to do here", r)
			continue
		}
		err := tunnel.Refusef(r, "test")
		byTLS := "close"
		if a := sni.AlertFor(err); a != 0 {
			byTLS = strconv.Itoa(int(a))
		}
		known := connect.Answer(&tunnel.Request{Peer: tunnel.Peer{ID: "alice", Method: "basic"}}, err)
		byConnect := fmt.Sprintf("%d `%s`", known.Status, known.Error)
		bySocks := fmt.Sprintf("%d, %s", socks5.ReplyFor(err), socks5.ReplyFor(err))
		switch r {
		case tunnel.Done, tunnel.Reset:
			byTLS, byConnect, bySocks = "", "", ""
		case tunnel.Idle, tunnel.HalfClosed, tunnel.Killed, tunnel.Revoked:
			byTLS, byConnect, bySocks = "reset", "reset", "reset"
		case tunnel.NoHello, tunnel.Gone:
			byConnect, bySocks = "close", "close"
		case tunnel.BadPreamble, tunnel.BadHello, tunnel.BadMethod, tunnel.TooLarge, tunnel.Flood, tunnel.NoSNI:
			bySocks = ""
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s | %s |\n", r, comment[1], byTLS, byConnect, bySocks, whatToDo[r])
	}
	return b.String()
}

// whatToDo is an operator's answer to each Reason.
var whatToDo = map[tunnel.Reason]string{
	tunnel.NoHello:      "nothing: browsers open spare connections, and load balancers check ports",
	tunnel.HelloTimeout: "look for a slow client or network; `limits.handshakeTimeout`",
	tunnel.BadPreamble:  "give clients of another protocol a listener of their own (`service`)",
	tunnel.BadHello:     "see `err` for the offset; the alert says what is wrong: 10, 22, 47, 50 or 70",
	tunnel.BadRequest:   "read the body of the answer; write addresses in their usual form",
	tunnel.BadMethod:    "the client uses the gateway as a web server, or as a proxy for plain HTTP: have it use CONNECT",
	tunnel.TooLarge:     "have the client send less: 16 KiB of head, 8 KiB of request line (414), 100 fields",
	tunnel.Gone:         "nothing, unless there are many",
	tunnel.Overload:     "see `err` for the limit that was reached",
	tunnel.Flood:        "look for a broken client or an attack; a client that aborts more than 100 tunnels a second needs more connections",
	tunnel.NoSNI:        "have the client connect by name",
	tunnel.NoAuth:       "check the client's credentials against the listener's `auth`",
	tunnel.NoRoute:      "`culvert explain NAME:PORT`; a service has only the ports it lists",
	tunnel.NotExposed:   "check `exposed` and `exposedTo` of the service",
	tunnel.Denied:       "check the policy",
	tunnel.Prohibited:   "for a service, see what its DNS name resolves to; 403 where the client asked for the address itself",
	tunnel.Insecure:     "use a `via` with TLS and credentials, or `insecure: true`: [between networks](../guides/gateway.md#between-networks)",
	tunnel.Loop:         "the endpoint is the gateway's own listener, or a gateway that leads back; 403 where the client asked for its address",
	tunnel.NoEndpoint:   "check the service's `endpoints`, and whether they have a port",
	tunnel.LookupError:  "check the name, and the host's DNS",
	tunnel.LookupTime:   "check the host's DNS",
	tunnel.DialFailed:   "see `attempts` for each address and error",
	tunnel.DialTimeout:  "look for a firewall, or a host that is down; `limits.connectTimeout`",
	tunnel.Unsupported:  "change the client's settings",
	tunnel.Internal:     "report it, with the log",
	tunnel.Done:         "nothing",
	tunnel.Reset:        "see `err` for the side that aborted",
	tunnel.Idle:         "raise `limits.idleTimeout`, or `idleTimeout` of the service, if it is too short",
	tunnel.HalfClosed:   "raise `limits.halfClosedTimeout`, or `halfClosedTimeout` of the service, if it is too short",
	tunnel.Drain:        "nothing: tunnels are reset at the end of `drain.timeout`",
	tunnel.Killed:       "nothing: the log says that an operator asked",
	tunnel.Revoked:      "nothing: a policy changed, or a credential ended",
}
