package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// secretText is what no file may have.
const secretText = "HUSH-HUSH-HUSH"

// A filler gives every field of a model a value that no other field has. What it
// does not know how to fill fails the test: it is new.
type filler struct {
	t       testing.TB
	n       int
	secrets bool
	some    int // of each slice
}

func (f *filler) fill(v reflect.Value) {
	f.t.Helper()
	f.n++
	switch v.Interface().(type) {
	case tunnel.Pattern:
		v.Set(reflect.ValueOf(tunnel.Pattern{Suffix: tunnel.MustParseName(fmt.Sprintf("n%d.example.com", f.n)), Wildcard: f.n%2 == 0}))
		return
	case tunnel.Name:
		v.Set(reflect.ValueOf(tunnel.MustParseName(fmt.Sprintf("n%d.example.com", f.n))))
		return
	case netip.Addr:
		v.Set(reflect.ValueOf(netip.AddrFrom4([4]byte{10, 0, byte(f.n >> 8), byte(f.n)})))
		return
	case netip.Prefix:
		v.Set(reflect.ValueOf(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(f.n >> 8), byte(f.n), 0}), 24)))
		return
	case registry.Secret:
		if f.secrets {
			v.SetString(secretText)
		}
		return
	case *registry.ListenerSettings, *registry.UnixSocket: // of listeners that are not saved
		return
	case *registry.TLSTermination:
		if f.secrets {
			v.Set(reflect.ValueOf(&registry.TLSTermination{Certificates: []registry.KeyPair{{Certificate: "c", Key: secretText}}}))
		}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type() == reflect.TypeFor[registry.Listener]() && v.Type().Field(i).Name == "Inherited" {
				continue // of listeners that are not saved
			}
			if v.Type().Field(i).IsExported() { // others are of tables
				f.fill(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), f.some, f.some))
		for i := range f.some {
			f.fill(v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range f.some {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			f.fill(key)
			f.fill(value)
			v.SetMapIndex(key, value)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(v.Elem())
	case reflect.String:
		v.SetString(fmt.Sprintf("text <&> %d", f.n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(f.n))
	case reflect.Uint8: // a word
		v.SetUint(1)
	case reflect.Uint16, reflect.Uint32:
		v.SetUint(uint64(f.n))
	default:
		f.t.Fatalf("a field of type %v can't be filled: teach it to this test, and to the file", v.Type())
	}
}

// fullSnapshot is a snapshot with two of everything in each field.
func fullSnapshot(t testing.TB, secrets bool) registry.Snapshot { return filledSnapshot(t, secrets, 2) }

func filledSnapshot(t testing.TB, secrets bool, some int) registry.Snapshot {
	t.Helper()
	var s registry.Snapshot
	(&filler{t: t, secrets: secrets, some: some}).fill(reflect.ValueOf(&s).Elem())
	s.GatewayTransport, s.Mesh = nil, nil // they are the file's, which is not saved
	s.Public = nil                        // of the network that the gateway is in now
	s.SetAddresses = nil                  // they lead to Listeners with Settings, which are not saved
	// An endpoint has one of Host and Addr.
	one := func(es []registry.Endpoint) {
		for i := range es {
			if i%2 == 0 {
				es[i].Host = ""
			} else {
				es[i].Addr = netip.Addr{}
			}
		}
	}
	for _, svc := range s.Services {
		one(svc.Endpoints)
	}
	for _, l := range s.Listeners {
		for _, sec := range l.Sections {
			for _, r := range sec.Rules {
				for i := range r.Backends {
					one(r.Backends[i].Service.Endpoints)
				}
			}
		}
	}
	return s
}

func encoded(t testing.TB, all map[string]*savedSnapshot) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := encode(t.Context(), &b, "settings", all, MaxSize); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func decoded(t testing.TB, data []byte) map[string]*savedSnapshot {
	t.Helper()
	all, err := decode(t.Context(), bytes.NewReader(data), "settings")
	if err != nil {
		t.Fatalf("%v in\n%s", err, data)
	}
	return all
}

var noon = time.Date(2026, 1, 2, 12, 0, 0, 7, time.UTC)

// Every field there is comes back: one that is forgotten is found here.
func TestRoundTrip(t *testing.T) {
	want := fullSnapshot(t, false)
	all := map[string]*savedSnapshot{"cluster/west": {want, noon}, "empty": {registry.Snapshot{}, noon}}
	got := decoded(t, encoded(t, all))
	if len(got) != 2 || got["empty"] == nil || !got["cluster/west"].time.Equal(noon) {
		t.Fatalf("got %v, want empty, and cluster/west of %v", got, noon)
	}
	if s := got["cluster/west"].Snapshot; !reflect.DeepEqual(s, want) {
		t.Errorf("got  %s\nwant %s", encoded(t, map[string]*savedSnapshot{"": {s, noon}}), encoded(t, map[string]*savedSnapshot{"": {want, noon}}))
		for i := range want.Services {
			if !reflect.DeepEqual(s.Services[i], want.Services[i]) {
				t.Errorf("service %d: got  %+v\nwant %+v", i, s.Services[i], want.Services[i])
			}
		}
	}
}

// A service that several backends share stays one.
func TestServicesAreShared(t *testing.T) {
	svc := &registry.Service{Name: "db"}
	var rules []*registry.Rule
	for range 3 {
		rules = append(rules, &registry.Rule{Backends: []registry.Backend{{Service: svc}}})
	}
	s := registry.Snapshot{Services: []*registry.Service{svc}, Listeners: []*registry.Listener{{Name: "edge", Sections: []*registry.Section{{Rules: rules}}}}}
	data := encoded(t, map[string]*savedSnapshot{"a": {s, noon}})
	if n := bytes.Count(data, []byte(`"db"`)); n != 1 {
		t.Errorf("the service is written %d times:\n%s", n, data)
	}
	got := decoded(t, data)["a"]
	for _, r := range got.Listeners[0].Sections[0].Rules {
		if r.Backends[0].Service != got.Services[0] {
			t.Error("the backend's service is another one")
		}
	}
}

// No secret is written, and what needs one refuses.
func TestSecretsAreNotKept(t *testing.T) {
	s := fullSnapshot(t, true)
	s.Listeners[0].Sections[0].TLS = nil
	data := encoded(t, map[string]*savedSnapshot{"a": {s, noon}})
	for _, not := range []string{secretText, "hidden"} {
		if bytes.Contains(data, []byte(not)) {
			t.Errorf("the file has %q:\n%s", not, data)
		}
	}
	got := decoded(t, data)["a"]
	for _, svc := range got.Services {
		if len(svc.Endpoints) > 0 || len(svc.Via) > 0 || svc.TLS != nil || len(svc.Names) == 0 {
			t.Errorf("a service that needs a key is kept as %+v", svc)
		}
	}
	for i, sec := range got.Listeners[0].Sections {
		if i == 0 {
			if b := sec.Rules[0].Backends[0]; b.Service != nil || b.Broken == "" {
				t.Errorf("a backend that needs a key is kept as %+v", b)
			}
			continue
		}
		if sec.TLS != nil || len(sec.Rules) > 0 || sec.Istio || sec.Host.Suffix.IsZero() {
			t.Errorf("a section where TLS ends is kept as %+v", sec)
		}
	}
}

// Each Secret alone is one that a service needs: a new one is found here.
func TestEachSecretCounts(t *testing.T) {
	try := func(of reflect.Type, service func(reflect.Value) *registry.Service) {
		n := 0
		for i := range of.NumField() {
			if of.Field(i).Type != reflect.TypeFor[registry.Secret]() {
				continue
			}
			n++
			v := reflect.New(of)
			v.Elem().Field(i).SetString(secretText)
			s := service(v)
			if !needsSecret(s) {
				t.Errorf("a service with %s.%s needs nothing", of, of.Field(i).Name)
			}
			data := encoded(t, map[string]*savedSnapshot{"a": {registry.Snapshot{Services: []*registry.Service{s}}, noon}})
			if bytes.Contains(data, []byte(secretText)) {
				t.Errorf("%s.%s is written", of, of.Field(i).Name)
			}
		}
		if n == 0 {
			t.Errorf("%s has no secret", of)
		}
	}
	try(reflect.TypeFor[registry.Hop](), func(v reflect.Value) *registry.Service {
		return &registry.Service{Via: []registry.Hop{*v.Interface().(*registry.Hop)}}
	})
	try(reflect.TypeFor[registry.Hop](), func(v reflect.Value) *registry.Service {
		return &registry.Service{Endpoints: []registry.Endpoint{{Host: "a.test"}, {Host: "b.test", Via: &[]registry.Hop{*v.Interface().(*registry.Hop)}}}}
	})
	try(reflect.TypeFor[registry.BackendTLS](), func(v reflect.Value) *registry.Service {
		return &registry.Service{TLS: v.Interface().(*registry.BackendTLS)}
	})
}

// An endpoint keeps the gateways that lead to it: without them it would be another host.
func TestEndpointsKeepTheirVia(t *testing.T) {
	via := []registry.Hop{{Proto: "connect", Addresses: []string{"https://gw.test:443"}}}
	want := []registry.Endpoint{{Host: "a.test", Port: 1}, {Host: "b.test", Port: 1, Via: &via}}
	data := encoded(t, map[string]*savedSnapshot{"a": {registry.Snapshot{Services: []*registry.Service{{Name: "a", Endpoints: want}}}, noon}})
	if got := decoded(t, data)["a"].Services[0].Endpoints; !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// withChecksum makes a file of lines, with the right end.
func withChecksum(lines ...string) []byte {
	text := strings.Join(lines, "\n") + "\n"
	sum := sha256.Sum256([]byte(text))
	return fmt.Appendf([]byte(text), "{\"end\":{\"lines\":%d,\"sha256\":%q}}\n", len(lines), hex.EncodeToString(sum[:]))
}

func headerLine() string {
	return fmt.Sprintf(`{"state":{"format":%q,"version":%d,"settings":%q}}`, format, version, digest("settings"))
}

const sourceLine = `{"source":{"name":"a","said":"2026-01-02T12:00:00Z"}}`

// A file that is not whole and ours is said to be so, and nothing of it is used.
func TestBadFiles(t *testing.T) {
	good := encoded(t, map[string]*savedSnapshot{"a": {filledSnapshot(t, false, 1), noon}})
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"empty":             {nil, "it is empty"},
		"no newline":        {[]byte("{"), "it is empty"},
		"something else":    {[]byte("version: 1\n"), "not a snapshot that culvert has saved"},
		"leases":            {[]byte(`{"version": 1, "ports": []}` + "\n"), "not a snapshot that culvert has saved"},
		"newer":             {bytes.Replace(good, []byte(`"version":3`), []byte(`"version":4`), 1), "of version 4, and this culvert reads version 3"},
		"newer and more":    {[]byte(`{"state":{"format":"culvert snapshot","version":7,"zip":true}}` + "\n"), "of version 7"},
		"other settings":    {bytes.Replace(good, []byte(digest("settings")), []byte(digest("others")), 1), "other settings"},
		"changed":           {bytes.Replace(good, []byte("example.com"), []byte("example.org"), 1), "checksum"},
		"a line less":       {bytes.Join(append(bytes.SplitAfter(good, []byte("\n"))[:2:2], bytes.SplitAfter(good, []byte("\n"))[3:]...), nil), "lines and has"},
		"more behind":       {append(bytes.Clone(good), good...), "continues after its end"},
		"unknown key":       {withChecksum(headerLine(), sourceLine, `{"service":{"name":"x","deny":true}}`), `line 3: json: unknown field "deny"`},
		"unknown line":      {withChecksum(headerLine(), sourceLine, `{"grant":{}}`), `unknown field "grant"`},
		"two in one":        {withChecksum(headerLine(), sourceLine, `{"section":{},"rule":{}}`), "2 known keys, not one: rule, section"},
		"none in one":       {withChecksum(headerLine(), sourceLine, `{}`), "0 known keys"},
		"two objects":       {withChecksum(headerLine(), sourceLine, `{"service":{}} {"service":{}}`), "line 3 has more than one object"},
		"no source":         {withChecksum(headerLine(), `{"service":{}}`), "line 2: service is out of place"},
		"two heads":         {withChecksum(headerLine(), headerLine()), "line 2: state is out of place"},
		"a source twice":    {withChecksum(headerLine(), sourceLine, sourceLine), `source "a" is there twice`},
		"a rule alone":      {withChecksum(headerLine(), sourceLine, `{"rule":{}}`), "rule is out of place"},
		"rule of the last":  {withChecksum(headerLine(), sourceLine, `{"listener":{}}`, `{"section":{}}`, `{"listener":{}}`, `{"rule":{}}`), "line 6: rule is out of place"},
		"section of others": {withChecksum(headerLine(), sourceLine, `{"listener":{}}`, strings.Replace(sourceLine, `"a"`, `"b"`, 1), `{"section":{}}`), "section is out of place"},
		"endpoints alone":   {withChecksum(headerLine(), sourceLine, `{"endpoints":[{"host":"a"}]}`), "endpoints is out of place"},
		"bad endpoint":      {withChecksum(headerLine(), sourceLine, `{"service":{}}`, `{"endpoints":[{"port":1}]}`), "exactly one of host and addr"},
		"loopback":          {withChecksum(headerLine(), sourceLine, `{"service":{}}`, `{"endpoints":[{"addr":"127.0.0.1","port":1}]}`), "an endpoint is 127.0.0.1, which no source may name"},
		"mapped loopback":   {withChecksum(headerLine(), sourceLine, `{"service":{}}`, `{"endpoints":[{"addr":"::ffff:127.0.0.1","port":1}]}`), "which no source may name"},
		"metadata":          {withChecksum(headerLine(), sourceLine, `{"service":{}}`, `{"endpoints":[{"addr":"169.254.169.254"}]}`), "which no source may name"},
		"localhost":         {withChecksum(headerLine(), sourceLine, `{"service":{}}`, `{"endpoints":[{"host":"a.LocalHost."}]}`), "which no source may name"},
		"gateway loopback":  {withChecksum(headerLine(), sourceLine, `{"network":{"name":"a","gateways":[{"address":{"addr":"127.0.0.1","port":1}}]}}`), "which no source may name"},
		"bad name":          {withChecksum(headerLine(), sourceLine, `{"service":{"names":["a b"]}}`), "line 3: name has a byte"},
		"bad host":          {withChecksum(headerLine(), sourceLine, `{"listener":{}}`, `{"section":{"host":"*."}}`), "line 4: name"},
		"bad rule":          {withChecksum(headerLine(), sourceLine, `{"listener":{}}`, `{"section":{}}`, `{"rule":{"names":[""]}}`), "name is empty"},
		"bad service":       {withChecksum(headerLine(), sourceLine, `{"listener":{}}`, `{"section":{}}`, `{"rule":{"backends":[{"service":0}]}}`), "there is no service 0, of 0"},
		"negative service":  {withChecksum(headerLine(), sourceLine, `{"service":{}}`, `{"listener":{}}`, `{"section":{}}`, `{"rule":{"backends":[{"service":-1}]}}`), "there is no service -1"},
		"service endpoints": {withChecksum(headerLine(), sourceLine, `{"service":{"endpoints":[{"addr":"127.0.0.1"}]}}`), "a service has endpoints in its own record"},
		"listener sections": {withChecksum(headerLine(), sourceLine, `{"listener":{"sections":[{}]}}`), "a listener has sections in its own record"},
		"section rules":     {withChecksum(headerLine(), sourceLine, `{"listener":{}}`, `{"section":{"rules":[{}]}}`), "a section has rules or keys in its own record"},
		"section keys":      {withChecksum(headerLine(), sourceLine, `{"listener":{}}`, `{"section":{"tls":{}}}`), "a section has rules or keys in its own record"},
		"a long line":       {withChecksum(headerLine(), sourceLine, `{"service":{"name":"`+strings.Repeat("x", MaxLine)+`"}}`), "line 3 is longer than the limit"},
	} {
		all, err := decode(t.Context(), bytes.NewReader(c.data), "settings")
		if all != nil || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, %v; want %q", name, all, err, c.want)
		}
	}
	for n := 0; n < len(good); n += 7 {
		if all, err := decode(t.Context(), bytes.NewReader(good[:n]), "settings"); err == nil || all != nil {
			t.Fatalf("%d of %d bytes are a file", n, len(good))
		}
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	if all, err := load(t.Context(), filepath.Join(dir, "none"), ""); all != nil || err != nil {
		t.Errorf("no file: got %v, %v", all, err)
	}
	if _, err := load(t.Context(), dir, ""); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder: %v", err)
	}
	if runtime.GOOS != "windows" {
		open := filepath.Join(dir, "open")
		if err := os.WriteFile(open, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(open, 0o620); err != nil {
			t.Fatal(err)
		}
		if _, err := load(t.Context(), open, ""); err == nil || !strings.Contains(err.Error(), "may be written by others") {
			t.Errorf("a file that others may write: %v", err)
		}
	}
	large := filepath.Join(dir, "large")
	f, err := os.Create(large)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(MaxSize + 1); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := load(t.Context(), large, ""); err == nil || !strings.Contains(err.Error(), "limit 268435456") {
		t.Errorf("a large file: %v", err)
	}
}

// What does not fit is not written, and what is there stays.
func TestEncodeLimit(t *testing.T) {
	all := map[string]*savedSnapshot{"a": {fullSnapshot(t, false), noon}}
	if err := encode(t.Context(), new(bytes.Buffer), "", all, 1000); err == nil || !strings.Contains(err.Error(), "limit of 1000 bytes") {
		t.Errorf("got %v, want the limit of 1000 bytes exceeded", err)
	}
	all = map[string]*savedSnapshot{"a": {registry.Snapshot{Services: []*registry.Service{{Name: strings.Repeat("x", MaxLine)}}}, noon}}
	if err := encode(t.Context(), new(bytes.Buffer), "", all, MaxSize); err == nil || !strings.Contains(err.Error(), "line 3 would take") {
		t.Errorf("got %v, want line 3 refused", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := encode(ctx, new(bytes.Buffer), "", all, MaxSize); err != context.Canceled {
		t.Errorf("got %v, want that it was cancelled", err)
	}
}

// A file that decodes is the same when it is written again.
func FuzzDecode(f *testing.F) {
	f.Add(encoded(f, map[string]*savedSnapshot{"a": {filledSnapshot(f, false, 1), noon}}))
	f.Add(encoded(f, map[string]*savedSnapshot{"a": {filledSnapshot(f, true, 1), noon}, "b": {registry.Snapshot{}, noon}}))
	f.Add(encoded(f, nil))
	f.Add(withChecksum(headerLine(), sourceLine, `{"service":{"names":["*.a.test"],"listed":true}}`, `{"endpoints":[{"addr":"fe80::1%eth0","port":1}]}`))
	f.Add(withChecksum(headerLine(), sourceLine, `{"listener":{"protocol":"tls"}}`, `{"section":{"host":"*.a.test"}}`, `{"rule":{"backends":[{"weight":1,"broken":"x"}]}}`))
	f.Add([]byte(headerLine()))
	f.Fuzz(func(t *testing.T, data []byte) {
		// With the right end, or no change would ever get further.
		if i := bytes.LastIndex(data, []byte(`{"end"`)); i > 0 {
			data = withChecksum(strings.Split(strings.TrimSuffix(string(data[:i]), "\n"), "\n")...)
		}
		all, err := decode(t.Context(), bytes.NewReader(data), "settings")
		if err != nil {
			if all != nil {
				t.Fatal("there is half of it")
			}
			return
		}
		once := encoded(t, all)
		if twice := encoded(t, decoded(t, once)); !bytes.Equal(once, twice) {
			t.Errorf("written again it is another:\n%s\n%s", once, twice)
		}
	})
}

// fleet is n endpoints, two of a service.
func fleet(n int) map[string]*savedSnapshot {
	var s registry.Snapshot
	for i := range n / 2 {
		name := fmt.Sprintf("service-%d.shop.svc.west.mesh.internal", i)
		svc := &registry.Service{
			Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Ports: []uint16{443}, Exposed: true,
			ID: registry.ID{Service: fmt.Sprintf("service-%d", i), Namespace: "shop", Cluster: "west"}, Origin: "Service shop/" + name,
		}
		for j := range 2 {
			svc.Endpoints = append(svc.Endpoints, registry.Endpoint{Addr: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), Port: 8443 + uint16(j), ServicePort: 443, Name: "pod", Network: "west", Cluster: "west"})
		}
		s.Services = append(s.Services, svc)
	}
	return map[string]*savedSnapshot{"cluster/west": {s, noon}}
}

func BenchmarkEncode(b *testing.B) {
	all := fleet(100_000)
	size := len(encoded(b, all))
	for b.Loop() {
		if err := encode(b.Context(), new(discard), "", all, MaxSize); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(size), "bytes")
}

func BenchmarkDecode(b *testing.B) {
	data := encoded(b, fleet(100_000))
	runtime.GC()
	for b.Loop() {
		decoded(b, data)
	}
}

type discard struct{}

func (*discard) Write(b []byte) (int, error) { return len(b), nil }

// A backend that is shown the key of a Secret refuses, as that key is not saved.
func TestKeysOfSecretsAreNotKept(t *testing.T) {
	for name, kept := range map[string]bool{"secret/shop/gw": false, "edge": true, "": true} {
		s := registry.Snapshot{Services: []*registry.Service{{Name: "db", TLS: &registry.BackendTLS{KeyName: name}, Endpoints: []registry.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1"), Port: 1}}}}}
		got := decoded(t, encoded(t, map[string]*savedSnapshot{"a": {s, noon}}))["a"].Services[0]
		if (got.TLS != nil && len(got.Endpoints) == 1) != kept {
			t.Errorf("with the key %q: got %+v", name, got)
		}
	}
}
