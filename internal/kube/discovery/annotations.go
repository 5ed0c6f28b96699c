package discovery

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/internal/kube/annotations"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// The annotations, without their prefix. Those of exposure may also be annotations of a Namespace,
// for all of its services that do not have them.
const (
	noteExpose        = "expose"
	noteNetworks      = "networks"
	noteNames         = "names"
	noteOwnPort       = "own-port"
	noteVIP           = "vip"
	noteExported      = "exported"
	noteProxyProtocol = "proxy-protocol"
	noteALPN          = "alpn"
	noteIdleTimeout   = "idle-timeout"
	noteHalfClosed    = "half-closed-timeout"
	noteCheck         = "check"
	noteClientsAllow  = "clients-allow"
	noteClientsDeny   = "clients-deny"
	noteStartTLS      = "start-tls"

	noteGateway    = "gateway"
	notePort       = "gateway-port"
	noteTransports = "gateway-transports"
	noteWeight     = "gateway-weight"

	noteImport = "import" // of the Services that internal/kube/imported keeps
)

// Limits of what one annotation may hold.
const (
	maxNames    = 64
	maxNetworks = 64
	maxALPN     = 16
)

// A Problem is an object or annotation that is refused, and why. It is comparable, because each is
// logged once.
type Problem struct {
	Kind      string // "Service", "Namespace" or "Secret"; "Nodes", without a Name, for all of them
	Namespace string
	Name      string
	Key       string // the annotation; "" where none is at fault
	Value     string
	Text      string // what is wrong, and what comes of it
}

func (p Problem) String() string {
	if p.Key == "" {
		return p.Text
	}
	return fmt.Sprintf("annotation %s%s: %q: %s", prefix, p.Key, clip(p.Value), p.Text)
}

// An exposure has the values of the annotations of a service and of its namespace.
type exposure struct {
	expose     bool
	mine       bool // expose stands at the service
	refused    bool // expose is there and says no
	networks   []string
	everyone   bool // networks says so
	names      []tunnel.Pattern
	ownPort    bool
	vip        bool
	exported   bool
	proxy      int
	alpn       []string
	idle       time.Duration
	halfClosed time.Duration
	check      registry.Check
	clients    registry.ClientFilter
	startTLS   string
	balancing  annotations.Balancing
	identity   annotations.Identity

	closed bool // something is malformed that must not be guessed
}

// A noteKind says what an annotation is for. An invalid annotation that closes keeps the service
// closed; any other is ignored.
type noteKind struct {
	key     string
	closes  bool
	inherit bool // may stand at a Namespace
	parse   func(x *exposure, value string) error
}

// noteKinds are in the order in which they are read.
var noteKinds = []noteKind{
	{noteExpose, true, true, func(x *exposure, v string) error { return parseBool(v, &x.expose) }},
	{noteNetworks, true, true, parseNetworks},
	{noteNames, false, false, parseNames},
	{noteOwnPort, false, true, func(x *exposure, v string) error { return parseBool(v, &x.ownPort) }},
	{noteVIP, false, true, func(x *exposure, v string) error { return parseBool(v, &x.vip) }},
	{noteExported, false, true, func(x *exposure, v string) error { return parseBool(v, &x.exported) }},
	{noteProxyProtocol, true, true, parseProxyProtocol}, // without the header bytes would be misread
	{annotations.ForwardIdentity, true, true, func(x *exposure, v string) (err error) {
		x.identity, err = annotations.ParseIdentity(v)
		return err
	}},
	{noteALPN, false, true, parseALPN},
	{noteIdleTimeout, false, true, func(x *exposure, v string) error { return parseDuration(v, &x.idle) }},
	{noteHalfClosed, false, true, func(x *exposure, v string) error { return parseDuration(v, &x.halfClosed) }},
	{noteCheck, false, true, func(x *exposure, v string) error { return parseCheck(v, &x.check) }},
	balancingKind(annotations.LoadBalancing),
	{noteStartTLS, true, true, parseStartTLS}, // without it a server would take a ClientHello for something else
	{noteClientsAllow, true, true, func(x *exposure, v string) error { return parseRanges(v, &x.clients.Allow) }},
	{noteClientsDeny, true, true, func(x *exposure, v string) error { return parseRanges(v, &x.clients.Deny) }},
	balancingKind(annotations.Connections),
	balancingKind(annotations.NewPerSecond),
	balancingKind(annotations.PerEndpoint),
	balancingKind(annotations.OutlierEjection),
}

// balancingKind returns the kind of an annotation that backends of Gateway API have, too.
func balancingKind(key string) noteKind {
	return noteKind{key, false, true, func(x *exposure, v string) error { return x.balancing.Set(key, v) }}
}

// parseNotes reads the annotations of a service and of its namespace, which is nil if it is not
// known.
func parseNotes(s *service, ns *namespace) (x exposure, problems []Problem) {
	for _, k := range noteKinds {
		v, ok := s.notes[k.key]
		p := Problem{Kind: "Service", Namespace: s.Namespace, Name: s.Name, Key: k.key}
		mine := ok
		if !ok && ns != nil && k.inherit {
			v, ok = ns.notes[k.key]
			p.Kind, p.Namespace, p.Name = "Namespace", "", ns.name
		}
		if !ok {
			continue
		}
		if k.key == noteExpose {
			x.mine = mine
		}
		if err := k.parse(&x, v); err != nil {
			p.Value, p.Text = clip(v), err.Error()+"; "+k.consequence()
			x.closed = x.closed || k.closes
			problems = append(problems, p)
			continue
		}
		if k.key == noteExpose {
			x.refused = !x.expose
		}
	}
	problems = append(problems, unknown(s.notes, Problem{Kind: "Service", Namespace: s.Namespace, Name: s.Name}, &x)...)
	if ns != nil {
		problems = append(problems, unknown(ns.notes, Problem{Kind: "Namespace", Name: ns.name}, &x)...)
	}
	return x, problems
}

func (k *noteKind) consequence() string {
	switch {
	case k.closes:
		return "the service is not exposed"
	case k.key == noteNames:
		return "that name is left out"
	}
	return "it is ignored"
}

// unknown reports annotations that do not exist. If one looks like a misspelled annotation that
// closes the service, the service stays closed.
func unknown(notes map[string]string, at Problem, x *exposure) (problems []Problem) {
	known := []string{noteGateway, notePort, noteTransports, noteWeight, noteImport}
	for _, k := range noteKinds {
		known = append(known, k.key)
	}
	for _, got := range slices.Sorted(maps.Keys(notes)) {
		if slices.Contains(known, got) {
			if k := slices.IndexFunc(noteKinds, func(k noteKind) bool { return k.key == got }); at.Kind == "Namespace" && k >= 0 && !noteKinds[k].inherit {
				p := at
				p.Key, p.Value, p.Text = got, clip(notes[got]), "it is for a Service, and ignored at a Namespace"
				problems = append(problems, p)
			}
			continue
		}
		p := at
		p.Key, p.Value, p.Text = clip(got), clip(notes[got]), "there is no annotation of this name; it is ignored"
		for _, k := range noteKinds {
			if near(got, k.key) || got+"-timeout" == k.key {
				p.Text = fmt.Sprintf("did you mean %s%s? %s", prefix, k.key, k.consequence())
				x.closed = x.closed || k.closes
				break
			}
		}
		problems = append(problems, p)
	}
	return problems
}

// near reports whether two words differ by two letters at most.
func near(a, b string) bool {
	if len(a) > len(b)+2 || len(b) > len(a)+2 {
		return false
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diagonal
			if a[i-1] != b[j-1] {
				cost++
			}
			diagonal, row[j] = row[j], min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)] <= 2
}

func parseBool(v string, to *bool) error {
	switch v {
	case "true":
		*to = true
	case "false":
		*to = false
	default:
		return fmt.Errorf(`write "true" or "false"`)
	}
	return nil
}

// items splits a list at its commas.
func items(v string, most int) ([]string, error) {
	list := strings.Split(v, ",")
	if len(list) > most {
		return nil, fmt.Errorf("it has %d items, limit %d", len(list), most)
	}
	for i, s := range list {
		if list[i] = strings.TrimSpace(s); list[i] == "" {
			return nil, fmt.Errorf("item %d is empty", i+1)
		}
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}

// networkMarks are the characters that the name of a network may have besides letters and digits.
// Any other, such as a semicolon, is more likely to be part of a malformed list.
const networkMarks = "._-/:@"

func notInNetwork(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(networkMarks, r)
}

func parseNetworks(x *exposure, v string) error {
	if strings.TrimSpace(v) == "" {
		return fmt.Errorf(`empty could be nobody or everyone; write "*" for everyone`)
	}
	list, err := items(v, maxNetworks)
	if err != nil {
		return err
	}
	for _, s := range list {
		switch {
		case s == "*" && len(list) > 1:
			return fmt.Errorf(`"*" means everyone, and must be alone`)
		case s != "*" && strings.ContainsFunc(s, notInNetwork):
			return fmt.Errorf("%q is not the name of a network: write letters, digits and any of %s, and commas between names", clip(s), networkMarks)
		}
	}
	if list[0] == "*" {
		x.everyone = true
		return nil
	}
	x.networks = list
	return nil
}

// parseNames returns the valid names of a list, even if others of it are not.
func parseNames(x *exposure, v string) error {
	list, err := items(v, maxNames)
	if err != nil {
		return err
	}
	for _, s := range list {
		p, bad := tunnel.ParsePattern(s)
		if bad != nil {
			err = bad
			continue
		}
		x.names = append(x.names, p)
	}
	return err
}

func parseProxyProtocol(x *exposure, v string) error {
	switch v {
	case "v1":
		x.proxy = 1
	case "v2":
		x.proxy = 2
	default:
		return fmt.Errorf(`write "v1" or "v2"`)
	}
	return nil
}

// parseALPN reads the identifiers of protocols, RFC 7301, in the order of
// preference.
func parseALPN(x *exposure, v string) error {
	list := strings.Split(v, ",")
	if len(list) > maxALPN {
		return fmt.Errorf("it has %d items, limit %d", len(list), maxALPN)
	}
	var all []string
	for i, s := range list {
		s = strings.TrimSpace(s)
		if s == "" || len(s) > 255 || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == '\\' }) {
			return fmt.Errorf("item %d is not the name of a protocol", i+1)
		}
		if !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	x.alpn = all
	return nil
}

func parseDuration(v string, to *time.Duration) error {
	d, err := time.ParseDuration(v)
	if err != nil || d < time.Millisecond {
		return fmt.Errorf("write a duration such as 90s or 1h30m")
	}
	*to = d
	return nil
}

// parseCheck reads "tcp", "tls", "http" or "none". A port may follow the first
// three after a colon, and for http then a path: "http:8008/primary",
// "http:/healthz".
func parseCheck(v string, to *registry.Check) error {
	if v == "none" {
		*to = registry.Check{}
		return nil
	}
	err := fmt.Errorf("write tcp, tls, http, each with :PORT if it is another than the endpoint's, http:/PATH, http:PORT/PATH or none")
	kind, rest, hasMore := strings.Cut(v, ":")
	c := registry.Check{Kind: kind}
	if kind != "tcp" && kind != "tls" && kind != "http" || hasMore && rest == "" {
		return err
	}
	portText, path, hasPath := strings.Cut(rest, "/")
	if portText != "" {
		port, parseErr := strconv.ParseUint(portText, 10, 16)
		if parseErr != nil || port == 0 || portText[0] == '+' {
			return err
		}
		c.Port = uint16(port)
	}
	if hasPath {
		c.Path = "/" + path
		if kind != "http" || len(c.Path) > 1024 || strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return err
		}
	}
	*to = c
	return nil
}

func parseStartTLS(x *exposure, v string) error {
	if v != "postgres" {
		return fmt.Errorf(`write "postgres"`)
	}
	x.startTLS = v
	return nil
}

func parseRanges(v string, to *[]netip.Prefix) (err error) {
	*to, err = registry.ParseClientRanges(v)
	return err
}

// clip shortens a text that is quoted.
func clip(s string) string { return annotations.Clip(s) }
