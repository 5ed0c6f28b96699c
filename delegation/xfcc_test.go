package delegation

import (
	"bytes"
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"math/big"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"
)

const (
	someHash = "468ed33be74eee6556d90c0149c1309e9ba61d6425303443c0748a02dd8de688"
	otherURI = "spiffe://corp.example/ns/web/sa/front"
)

func hashOf(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Fields as Envoy documents and sends them are read, with more of the grammar than it sends.
func TestParseXFCC(t *testing.T) {
	hash := hashOf(t, someHash)
	for _, row := range []struct {
		values []string
		want   []XFCC
	}{
		{nil, nil},
		{
			[]string{`By=http://frontend.example.com;Hash=` + someHash + `;Subject="/C=US/ST=CA/L=San Francisco/OU=Shop/CN=Test Client";URI=http://testclient.example.com`},
			[]XFCC{{By: []string{"http://frontend.example.com"}, Hash: hash, Subject: "/C=US/ST=CA/L=San Francisco/OU=Shop/CN=Test Client", URI: []string{"http://testclient.example.com"}}},
		},
		{
			[]string{`By=http://frontend.example.com;Hash=` + someHash + `;URI=http://testclient.example.com,By=http://backend.example.com;Hash=` + someHash + `;URI=http://frontend.example.com`},
			[]XFCC{
				{By: []string{"http://frontend.example.com"}, Hash: hash, URI: []string{"http://testclient.example.com"}},
				{By: []string{"http://backend.example.com"}, Hash: hash, URI: []string{"http://frontend.example.com"}},
			},
		},
		{ // several lines are one list
			[]string{`URI=a:b`, `by=a:c;BY=a:d;dns=one.test;DNS=two.test`},
			[]XFCC{{URI: []string{"a:b"}}, {By: []string{"a:c", "a:d"}, DNS: []string{"one.test", "two.test"}}},
		},
		{ // quotes hide what else would end a value
			[]string{`Subject="CN=a\"b,c;d=e";URI="urn:x,y;z=1" , URI=urn:x?y=z`},
			[]XFCC{{Subject: `CN=a"b,c;d=e`, URI: []string{"urn:x,y;z=1"}}, {URI: []string{"urn:x?y=z"}}},
		},
		{[]string{`Subject="O=Acme\, Inc.,CN=x"`}, []XFCC{{Subject: `O=Acme\, Inc.,CN=x`}}},
		{[]string{`By=;Subject="";URI=;DNS=;Other="1;2";URI=a:b`}, []XFCC{{URI: []string{"a:b"}}}}, // as Envoy does of what a certificate lacks
	} {
		if got, err := ParseXFCC(row.values...); err != nil || !reflect.DeepEqual(got, row.want) {
			t.Errorf("%q:\n got %+v, %v\nwant %+v", row.values, got, err, row.want)
		}
	}
	for name, values := range map[string][]string{
		"empty":                           {""},
		"an empty element":                {"URI=a:b,"},
		"an empty element first":          {",URI=a:b"},
		"an empty pair":                   {"URI=a:b;;DNS=c"},
		"no key":                          {"=a:b"},
		"no value":                        {"URI"},
		"a quote that does not end":       {`Subject="CN=a`},
		"a quote that is escaped":         {`Subject="CN=a\";URI=a:b`},
		"two backslashes before a quote":  {`Subject="CN=a\\";URI=a:b"`},
		"text behind a quote":             {`Subject="CN=a"b`},
		"a quote inside":                  {`URI=a"b"`},
		"a quoted key":                    {`"URI"=a:b`},
		"a control":                       {"URI=a\x00b"},
		"a line":                          {"URI=\"a\nb\""},
		"no UTF-8":                        {"URI=a\xffb"},
		"two hashes":                      {"Hash=" + someHash + ";hash=" + someHash},
		"two subjects":                    {`Subject="a";Subject="b"`},
		"a hash that is none":             {"Hash=00"},
		"a hash that is no number":        {"Hash=" + strings.Repeat("x", 64)},
		"a certificate that is none":      {"Cert=x"},
		"a certificate that is no URL":    {"Cert=%x"},
		"a certificate with more in it":   {"Chain=" + escapePEM([]byte("x")) + "x"},
		"two certificates for one":        {"Cert=" + escapePEM([]byte("x"), []byte("y"))},
		"more elements than the limit":    {strings.Repeat("URI=a:b,", MaxXFCCElements) + "URI=a:b"},
		"more lines than the limit":       slicesRepeat("URI=a:b", MaxXFCCElements+1),
		"more pairs than the limit":       {strings.Repeat("URI=a:b;", maxPairs) + "URI=a:b"},
		"more bytes than the limit":       {"URI=" + strings.Repeat("a", MaxXFCC)},
		"more bytes in all, of two lines": {"URI=" + strings.Repeat("a", MaxXFCC/2), "URI=" + strings.Repeat("a", MaxXFCC/2)},
	} {
		if got, err := ParseXFCC(values...); err == nil {
			t.Errorf("%s: got %+v, want it refused", name, got)
		}
	}
}

func slicesRepeat(s string, n int) (all []string) {
	for range n {
		all = append(all, s)
	}
	return all
}

// What is written is read as it was, with certificates in it.
func TestXFCCIsReadAsItWasWritten(t *testing.T) {
	leaf := newWorld(t).gateway.TLS.Leaf
	sum := sha256.Sum256(leaf.Raw)
	want := []XFCC{
		{By: []string{gatewayID, "urn:a,b"}, URI: []string{"urn:x;y", "a=b"}, DNS: []string{"one.test", "a b"}},
		{Hash: sum[:], Cert: leaf.Raw, Chain: [][]byte{leaf.Raw, []byte("+/ CA")}, Subject: `CN=a\, b`},
	}
	text, err := FormatXFCC(want...)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseXFCC(text); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s:\n got %+v, %v\nwant %+v", text, got, err, want)
	}
	if strings.ContainsAny(text, "+/\n") && strings.Contains(strings.SplitN(text, "Cert=", 2)[1], "\n") {
		t.Errorf("%q: got a line break", text)
	}
	for name, x := range map[string]XFCC{
		"nothing":                 {},
		"a quote":                 {URI: []string{`a"b`}},
		"a backslash at the end":  {URI: []string{`a\`}},
		"two backslashes":         {By: []string{`a\\b`}},
		"a line":                  {DNS: []string{"a\nb"}},
		"no ASCII":                {Subject: "CN=ü"},
		"a hash that is too long": {Hash: make([]byte, 33)},
		"too much":                {Chain: [][]byte{make([]byte, MaxXFCC)}},
	} {
		if got, err := FormatXFCC(x); err == nil {
			t.Errorf("%s: got %q, want it refused", name, got)
		}
	}
	if _, err := FormatXFCC(make([]XFCC, MaxXFCCElements+1)...); err == nil {
		t.Error("more elements than the limit: want them refused")
	}
}

// hostile returns a certificate with those names in it, which a CA might sign.
func hostile(t testing.TB, commonName string, uris, dns []string) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: dns,
		Subject: pkix.Name{CommonName: commonName, Organization: []string{"Acme, Inc."}},
	}
	for _, s := range uris {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		template.URIs = append(template.URIs, u)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}

// No name that a CA has signed says anything else in the field.
func TestNamesDoNotEscapeFromXFCC(t *testing.T) {
	const admin = "spiffe://corp.example/admin"
	for _, row := range []struct {
		name     string
		cert     *x509.Certificate
		subject  string
		uri, dns []string
	}{
		{"plain", hostile(t, "front", []string{otherURI, "urn:a=b"}, []string{"front.test"}), `CN=front,O=Acme\2C Inc.`, []string{otherURI, "urn:a=b"}, []string{"front.test"}},
		{"another pair", hostile(t, "x;URI="+admin, []string{"urn:x;URI=" + admin}, []string{"a;URI=" + admin, "a.test"}), `CN=x\3BURI=` + admin + `,O=Acme\2C Inc.`, nil, []string{"a.test"}},
		{"another element", hostile(t, "x,By=me", []string{"urn:x,URI=" + admin}, []string{"a,URI=" + admin}), `CN=x\2CBy=me,O=Acme\2C Inc.`, nil, nil},
		{"a quote", hostile(t, `x";URI=`+admin, nil, []string{`a";URI=` + admin, "b.test"}), `CN=x\22\3BURI=` + admin + `,O=Acme\2C Inc.`, nil, []string{"b.test"}},
		{"a backslash", hostile(t, `x\`, nil, []string{`a\`, `b\";URI=` + admin, "c.test"}), `CN=x\5C,O=Acme\2C Inc.`, nil, []string{"c.test"}},
		{"a line", hostile(t, "x\r\nAdmin: 1", nil, []string{"a\r\nAdmin: 1", "a b", "d.test"}), `CN=x\0D\0AAdmin: 1,O=Acme\2C Inc.`, nil, []string{"d.test"}},
		{"letters", hostile(t, "ü", nil, nil), `CN=\C3\BC,O=Acme\2C Inc.`, nil, nil},
	} {
		text, err := FormatXFCC(NewXFCC(gatewayID, row.cert))
		if err != nil {
			t.Errorf("%s: %v", row.name, err)
			continue
		}
		sum := sha256.Sum256(row.cert.Raw)
		// Go's form of "=" in a subject differs between versions; it means the same.
		got, err := ParseXFCC(text)
		if len(got) == 1 {
			got[0].Subject = strings.ReplaceAll(got[0].Subject, `\3D`, "=")
		}
		want := []XFCC{{By: []string{gatewayID}, Hash: sum[:], Subject: row.subject, URI: row.uri, DNS: row.dns}}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %s:\n got %+v, %v\nwant %+v", row.name, text, got, err, want)
		}
		// Also for readers that look for a text in it.
		for _, lie := range []string{";URI=" + admin, ",URI=" + admin, ",By=me"} {
			if strings.Contains(text, lie) {
				t.Errorf("%s: %s has %q in it", row.name, text, lie)
			}
		}
	}
}

func FuzzXFCC(f *testing.F) {
	for _, s := range []string{
		`By=http://frontend.example.com;Hash=` + someHash + `;Subject="/C=US/CN=Test Client";URI=http://testclient.example.com`,
		`By=a:b;URI=c:d,By=e:f;DNS=g`, `Subject="CN=a\"b,c;d=e";URI="urn:x,y;z=1"`, `Cert="` + escapePEM([]byte("x")) + `"`, `Subject="a\\"`, "",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		elements, err := ParseXFCC(s)
		if err != nil {
			if reason(err) == "" || len(elements) > 0 {
				t.Fatalf("%q: got %v and %+v, want an *Error alone", s, err, elements)
			}
			return
		}
		for i := range elements {
			x := &elements[i]
			if one := reflect.ValueOf(*x); one.IsZero() {
				continue
			}
			text, err := FormatXFCC(*x)
			if err != nil {
				continue // what is not written in two ways, or is no ASCII
			}
			again, err := ParseXFCC(text)
			if err != nil || len(again) != 1 || !reflect.DeepEqual(again[0], *x) {
				t.Fatalf("%q: %q is read as %+v, %v, and was %+v", s, text, again, err, *x)
			}
		}
	})
}

// The fields of RFC 9440 have the certificates, and no CA that has signed itself.
func TestClientCert(t *testing.T) {
	w := newWorld(t)
	leaf := w.gateway.TLS.Leaf
	ca := hostile(t, "root", nil, nil)
	cert, chain, err := FormatClientCert([]*x509.Certificate{leaf, w.other.TLS.Leaf, ca})
	if err != nil || !strings.HasPrefix(cert, ":MI") || !strings.HasSuffix(cert, ":") || strings.Count(chain, ":") != 2 {
		t.Fatalf("got %q and %q, %v", cert, chain, err)
	}
	got, err := ParseClientCert(http.Header{"Client-Cert": {cert}, "Client-Cert-Chain": {chain, chain + " ,\t" + chain}})
	if err != nil || len(got) != 4 || !got[0].Equal(leaf) || !got[3].Equal(w.other.TLS.Leaf) {
		t.Errorf("got %d certificates, %v", len(got), err)
	}
	if _, chain, err = FormatClientCert([]*x509.Certificate{leaf, ca}); chain != "" || err != nil {
		t.Errorf("with the root alone: got the chain %q, %v", chain, err)
	}
	if got, err := ParseClientCert(http.Header{"Accept": {"x"}}); got != nil || err != nil {
		t.Errorf("without the field: got %v, %v", got, err)
	}
	if _, _, err := FormatClientCert(nil); reason(err) != Missing {
		t.Errorf("without a certificate: got %v", err)
	}
	many := make([]*x509.Certificate, 2+maxClientCertChain)
	for i := range many {
		many[i] = leaf
	}
	if _, _, err := FormatClientCert(many); reason(err) != TooLarge {
		t.Errorf("a long chain: got %v", err)
	}
	for name, h := range map[string]http.Header{
		"twice":                  {"Client-Cert": {cert, cert}},
		"two in one":             {"Client-Cert": {cert + ", " + cert}},
		"in lower case":          {"client-cert": {cert}},
		"with an underscore":     {"Client_cert": {cert}},
		"beside an underscore":   {"Client-Cert": {cert}, "Client_Cert": {cert}},
		"the chain in lowercase": {"Client-Cert": {cert}, "client-cert-chain": {cert}},
		"the chain alone":        {"Client-Cert-Chain": {cert}},
		"an empty chain":         {"Client-Cert": {cert}, "Client-Cert-Chain": {""}},
		"empty":                  {"Client-Cert": {""}},
		"no certificate":         {"Client-Cert": {"::"}},
		"no DER":                 {"Client-Cert": {":AAAA:"}},
		"no colons":              {"Client-Cert": {strings.Trim(cert, ":")}},
		"base64url":              {"Client-Cert": {":-_-_:"}},
		"parameters":             {"Client-Cert": {cert + ";a=1"}},
		"PEM":                    {"Client-Cert": {string(w.gateway.CertPEM)}},
		"too many":               {"Client-Cert": {cert}, "Client-Cert-Chain": {strings.Repeat(cert+",", maxClientCertChain) + cert}},
		"too large":              {"Client-Cert": {":" + strings.Repeat("A", MaxClientCert) + ":"}},
	} {
		if got, err := ParseClientCert(h); err == nil {
			t.Errorf("%s: got %d certificates, want them refused", name, len(got))
		}
	}
}

func FuzzClientCert(f *testing.F) {
	leaf := newWorld(f).gateway.TLS.Leaf
	cert, _, err := FormatClientCert([]*x509.Certificate{leaf})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(cert, cert)
	f.Add("::", "")
	f.Fuzz(func(t *testing.T, cert, chain string) {
		certs, err := ParseClientCert(http.Header{"Client-Cert": {cert}, "Client-Cert-Chain": {chain}})
		if err != nil {
			return
		}
		again, _, err := FormatClientCert(certs)
		if err != nil || strings.Trim(cert, " \t") != again {
			t.Fatalf("%q: written again as %q, %v", cert, again, err)
		}
	})
}

// A gateway removes what its client says of itself, in any spelling, and says what it has
// verified.
func TestForwardingRemovesFirst(t *testing.T) {
	w := newWorld(t)
	leaf := w.other.TLS.Leaf
	chain := []*x509.Certificate{leaf, w.gateway.TLS.Leaf}
	own, err := FormatXFCC(NewXFCC(gatewayID, leaf))
	if err != nil {
		t.Fatal(err)
	}
	anonymous := NewXFCC(gatewayID, leaf)
	anonymous.URI = nil
	nameless, err := FormatXFCC(anonymous)
	if err != nil {
		t.Fatal(err)
	}
	before := XFCC{By: []string{otherID}, URI: []string{callerID}}
	cert, rest, err := FormatClientCert(chain)
	if err != nil {
		t.Fatal(err)
	}
	lie := `By=` + gatewayID + `;URI=` + otherURI
	for _, row := range []struct {
		name  string
		f     Forwarding
		chain []*x509.Certificate
		want  http.Header
		fails bool
		id    string // "" for that of the certificate
	}{
		{name: "none", chain: chain, want: http.Header{}},
		{name: "none by name", f: Forwarding{XFCC: XFCCNone}, chain: chain, want: http.Header{}},
		{name: "sanitizeSet", f: Forwarding{XFCC: XFCCSanitizeSet}, chain: chain, want: http.Header{XFCCField: {own}}},
		{name: "appendForward", f: Forwarding{XFCC: XFCCAppendForward}, chain: chain, want: http.Header{XFCCField: {"By=" + otherID + ";URI=" + callerID + "," + own}}},
		{name: "RFC 9440", f: Forwarding{ClientCert: true}, chain: chain, want: http.Header{ClientCertField: {cert}, ClientCertChainField: {rest}}},
		{name: "all", f: Forwarding{XFCCSanitizeSet, true}, chain: chain[:1], want: http.Header{XFCCField: {own}, ClientCertField: {cert}}},
		{name: "an id that is not of its trust domain", f: Forwarding{XFCCSanitizeSet, true}, chain: chain, id: "uri:" + otherID, want: http.Header{XFCCField: {nameless}}},
		{name: "an id of another", f: Forwarding{XFCCAppendForward, false}, chain: chain, id: callerID, want: http.Header{XFCCField: {"By=" + otherID + ";URI=" + callerID + "," + nameless}}},
		{name: "a client without a certificate", f: Forwarding{XFCCAppendForward, true}, want: http.Header{}},
		{name: "a mode that is none", f: Forwarding{XFCC: "always"}, chain: chain, want: http.Header{}, fails: true},
	} {
		h := http.Header{"Accept": {"text/plain"}, "X-Client-Cert": {"other"}}
		for _, name := range []string{"X-Forwarded-Client-Cert", "x-forwarded-client-cert", "X_Forwarded_Client_Cert", "X-FORWARDED-CLIENT_CERT", "Culvert-Peer", "CULVERT_PEER", "Client-Cert", "client_cert", "Client-Cert-Chain", "Client_Cert-Chain"} {
			h[name] = []string{lie, lie}
		}
		row.want["Accept"], row.want["X-Client-Cert"] = []string{"text/plain"}, []string{"other"}
		err := row.f.Set(h, &Caller{By: gatewayID, Chain: row.chain, ID: cmp.Or(row.id, otherID), Before: []XFCC{before}})
		if (err != nil) != row.fails || !reflect.DeepEqual(h, row.want) {
			t.Errorf("%s:\n got %q, %v\nwant %q", row.name, h, err, row.want)
		}
	}
}

// A service takes the field of its gateways alone, in their sessions.
func TestXFCCOfAGateway(t *testing.T) {
	w := newWorld(t)
	session := func(c *x509.Certificate) *tls.ConnectionState {
		return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{c}}
	}
	text := func(elements ...XFCC) string {
		s, err := FormatXFCC(elements...)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	leaf := w.other.TLS.Leaf
	own := NewXFCC(gatewayID, leaf)
	foreign := XFCC{By: []string{otherID}, URI: []string{callerID}}
	lie := own
	lie.Cert = w.service.TLS.Leaf.Raw
	for _, row := range []struct {
		name    string
		fields  http.Header
		cs      *tls.ConnectionState
		domains []string
		want    Reason // "" means that it is taken
	}{
		{name: "of the gateway", fields: http.Header{XFCCField: {text(own)}}},
		{name: "with others before", fields: http.Header{XFCCField: {text(foreign, own)}}},
		{name: "of its trust domain", fields: http.Header{XFCCField: {text(own)}}, domains: []string{"corp.example"}},
		{name: "none", fields: http.Header{}, want: Missing},
		{name: "malformed", fields: http.Header{XFCCField: {"x"}}, want: Malformed},
		{name: "in another case", fields: http.Header{strings.ToLower(XFCCField): {text(own)}}, want: Malformed},
		{name: "with an underscore", fields: http.Header{XFCCField: {text(own)}, "X-Forwarded-Client_cert": {text(own)}}, want: Malformed},
		{name: "without TLS", fields: http.Header{XFCCField: {text(own)}}, cs: &tls.ConnectionState{}, want: NoBinding},
		{name: "of another workload", fields: http.Header{XFCCField: {text(own)}}, cs: session(leaf), want: UnknownGateway},
		{name: "of another CA", fields: http.Header{XFCCField: {text(own)}}, cs: session(newWorld(t).gateway.TLS.Leaf), want: BadCertificate},
		{name: "by somebody else", fields: http.Header{XFCCField: {text(own, foreign)}}, want: UnknownGateway},
		{name: "by nobody", fields: http.Header{XFCCField: {"URI=" + callerID}}, want: UnknownGateway},
		{name: "of another trust domain", fields: http.Header{XFCCField: {text(foreign, own)}}, domains: []string{"corp.example"}, want: NotDelegated},
		{name: "of no trust domain", fields: http.Header{XFCCField: {"By=" + gatewayID + ";DNS=front.test"}}, domains: []string{"corp.example"}, want: NotDelegated},
		{name: "with the hash of another", fields: http.Header{XFCCField: {text(lie)}}, want: Malformed},
	} {
		v := w.verifier()
		v.Gateways[0].TrustDomains = row.domains
		if row.cs == nil {
			row.cs = session(w.gateway.TLS.Leaf)
		}
		got, err := v.XFCC(&http.Request{Header: row.fields, TLS: row.cs})
		if reason(err) != row.want || err == nil && (len(got) == 0 || !bytes.Equal(got[len(got)-1].Hash, own.Hash)) {
			t.Errorf("%s: got %+v, %v, want %q", row.name, got, err, row.want)
		}
	}
	if _, err := w.verifier().XFCC(&http.Request{Header: http.Header{XFCCField: {text(own)}}}); reason(err) != NoBinding {
		t.Errorf("without TLS: got %v", err)
	}
}
