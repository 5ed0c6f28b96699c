//go:build linux && netns

package interop

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// The entries of an agent, as the guide calls them.
const (
	byConnect = "CONNECT"
	bySOCKS   = "SOCKS5"
	byHTTP    = "http URL"
	byPAC     = "PAC file"
	byPort    = "port"
	byUnix    = "Unix socket"
	bySystemd = "systemd"
	byCommand = "culvert connect"
	byExec    = "culvert exec"
	byCapture = "capture"
)

var entries = []string{byConnect, bySOCKS, byHTTP, byPAC, byPort, byUnix, bySystemd, byCommand, byExec, byCapture}

// A program is a row of the table of programs by entries: at each entry it runs, or there is a
// reason why it cannot.
type program struct {
	name string

	// want is in what it writes once the service has seen the program's own certificate or key.
	want string

	// plain is the script of the program as it runs without an agent: for culvert exec, and where
	// capture is. The others are at the entry that they are for. At a socket of systemd, which is a
	// port to a program, there is the script for CONNECT or, without one, for the port.
	plain string
	at    map[string]string

	not map[string]string // why it cannot use an entry

	always bool // by each way out, and not directly alone
}

const (
	noPAC     = "evaluates no PAC file"
	noProxy   = "has no setting for a proxy"
	noCommand = "takes no connection of another program"
	noHTTP    = "is no client of HTTP"
)

// Parts of scripts.
const (
	withFiles = `--cacert ca.pem --cert me.pem --key me.key`
	gitFiles  = `-c http.sslCAInfo=ca.pem -c http.sslCert=me.pem -c http.sslKey=me.key`
	gitLog    = `; git -C site log --format=%s`
	psqlFiles = `sslmode=verify-full sslrootcert=ca.pem sslcert=me.pem sslkey=me.key user=web dbname=postgres`
	jdbcFiles = `postgres?user=web&sslmode=verify-full&sslrootcert=ca.pem&sslcert=me.pem&sslkey=me.pk8" "$QUERY"`
	kubeFiles = `--certificate-authority ca.pem --client-certificate me.pem --client-key me.key`
	sshKey    = `'cat $SSH_USER_AUTH'` // the key that sshd has let in
)

// matrix is the table. Scripts run in a folder with the files of the guide's recipes, and
// with the variables of world.cell.
var matrix = []program{
	{
		name: "curl", want: "you are " + clientID + " by HTTP/",
		plain: `curl -sS ` + withFiles + ` https://orders.shop.example/`,
		at: map[string]string{
			byConnect: `curl -sS ` + withFiles + ` --proxy http://127.0.0.1:$PROXY https://orders.shop.example/`,
			bySOCKS:   `curl -sS ` + withFiles + ` --proxy socks5h://127.0.0.1:$PROXY https://orders.shop.example/`,
			byHTTP:    `curl -sS --proxy http://127.0.0.1:$PROXY http://page.shop.example/`,
			byPort:    `curl -sS ` + withFiles + ` --connect-to ::127.0.0.1:$ORDERS https://orders.shop.example/`,
			byUnix:    `curl -sS ` + withFiles + ` --unix-socket $SOCKETS/orders https://orders.shop.example/`,
		},
		always: true,
		not:    map[string]string{byPAC: noPAC, byCommand: noCommand},
	},
	{
		name: "git", want: "in a repository", // which is for this client alone
		plain: `git ` + gitFiles + ` clone -q https://orders.shop.example/site.git` + gitLog,
		at: map[string]string{
			byConnect: `git -c http.proxy=http://127.0.0.1:$PROXY ` + gitFiles + ` clone -q https://orders.shop.example/site.git` + gitLog,
			bySOCKS:   `git -c http.proxy=socks5h://127.0.0.1:$PROXY ` + gitFiles + ` clone -q https://orders.shop.example/site.git` + gitLog,
			byHTTP:    `git -c http.proxy=http://127.0.0.1:$PROXY clone -q http://page.shop.example/site.git` + gitLog,
			byPort:    `git -c http.curloptResolve=orders.shop.example:$ORDERS:127.0.0.1 ` + gitFiles + ` clone -q https://orders.shop.example:$ORDERS/site.git` + gitLog,
			byUnix:    `GIT_SSH_COMMAND="ssh -F ssh_config -o ProxyCommand='nc.openbsd -U $SOCKETS/build'" git clone -q ssh://build.shop.example$REPOSITORY site` + gitLog,
			byCommand: `GIT_SSH_COMMAND="ssh -F ssh_config -o ProxyCommand='$CONNECT %h %p'" git clone -q ssh://build.shop.example$REPOSITORY site` + gitLog,
		},
		always: true,
		not:    map[string]string{byPAC: noPAC},
	},
	{
		name: "OpenSSH", want: "publickey ssh-ed25519 $PUBLIC",
		plain: `ssh -F ssh_config build.shop.example ` + sshKey,
		at: map[string]string{
			byConnect: `ssh -F ssh_config -o ProxyCommand="nc.openbsd -X connect -x 127.0.0.1:$PROXY %h %p" build.shop.example ` + sshKey,
			bySOCKS:   `ssh -F ssh_config -o ProxyCommand="nc.openbsd -X 5 -x 127.0.0.1:$PROXY %h %p" build.shop.example ` + sshKey,
			byPort:    `ssh -F ssh_config -o HostKeyAlias=build.shop.example -p $BUILD 127.0.0.1 ` + sshKey,
			byUnix:    `ssh -F ssh_config -o ProxyCommand="nc.openbsd -U $SOCKETS/build" build.shop.example ` + sshKey,
			byCommand: `ssh -F ssh_config -o ProxyUseFdpass=yes -o ProxyCommand="$CONNECT --fdpass %h %p" build.shop.example ` + sshKey,
		},
		always: true,
		not:    map[string]string{byHTTP: noHTTP, byPAC: noPAC},
	},
	{
		name: "psql", want: "/CN=web",
		plain: `psql -X -A -t -c "$QUERY" 'host=db.shop.example ` + psqlFiles + `'`,
		at: map[string]string{
			byPort: `psql -X -A -t -c "$QUERY" "host=db.shop.example hostaddr=127.0.0.1 port=$DB ` + psqlFiles + `"`,
			// libpq has no TLS there: the agent speaks it.
			byUnix: `psql -X -A -t -c "$QUERY" "host=$SOCKETS user=web dbname=postgres"`,
		},
		always: true,
		not:    map[string]string{byConnect: noProxy, bySOCKS: noProxy, byHTTP: noHTTP, byPAC: noPAC, byCommand: noCommand},
	},
	{
		name: "redis-cli", want: "in a cache", // whose server lets in certificates of the CA, and the client has the only one
		plain: `redis-cli -h cache.shop.example --tls --sni cache.shop.example ` + withFiles + ` get where`,
		at: map[string]string{
			byPort: `redis-cli -h 127.0.0.1 -p $CACHE --tls --sni cache.shop.example ` + withFiles + ` get where`,
			byUnix: `redis-cli -s $SOCKETS/cache --tls --sni cache.shop.example ` + withFiles + ` get where`,
		},
		not: map[string]string{byConnect: noProxy, bySOCKS: noProxy, byHTTP: noHTTP, byPAC: noPAC, byCommand: noCommand},
	},
	{
		name: "Chromium", want: "you are " + clientID + " by HTTP/",
		plain: `$CHROMIUM https://orders.shop.example/`,
		at: map[string]string{
			byConnect: `$CHROMIUM --proxy-server=http://127.0.0.1:$PROXY https://orders.shop.example/`,
			bySOCKS:   `$CHROMIUM --proxy-server=socks5://127.0.0.1:$PROXY https://orders.shop.example/`,
			byHTTP:    `$CHROMIUM --proxy-pac-url=http://127.0.0.1:$PROXY/proxy.pac http://page.shop.example/`,
			byPAC:     `$CHROMIUM --proxy-pac-url=http://127.0.0.1:$PROXY/proxy.pac https://orders.shop.example/`,
			byPort:    `$CHROMIUM --host-resolver-rules="MAP orders.shop.example:443 127.0.0.1:$ORDERS" https://orders.shop.example/`,
		},
		not: map[string]string{byUnix: "connects to no Unix socket", byCommand: noCommand},
	},
	{
		name: "Python", want: "you are " + clientID + " by HTTP/1",
		plain: `python3 $DATA/ask.py direct https://orders.shop.example/`,
		at: map[string]string{
			byConnect: `HTTPS_PROXY=http://127.0.0.1:$PROXY python3 $DATA/ask.py direct https://orders.shop.example/`,
			bySOCKS:   `python3 $DATA/ask.py socks5 $PROXY`,
			byHTTP:    `http_proxy=http://127.0.0.1:$PROXY python3 $DATA/ask.py direct http://page.shop.example/`,
			byPort:    `python3 $DATA/ask.py port $ORDERS`,
			byUnix:    `python3 $DATA/ask.py unix $SOCKETS/orders`,
			byCommand: `python3 $DATA/ask.py command "$CONNECT"`,
		},
		not: map[string]string{byPAC: noPAC},
	},
	{
		name: "Node", want: "you are " + clientID + " by HTTP/1.1",
		plain: `node $DATA/ask.mjs direct https://orders.shop.example/`,
		at: map[string]string{
			byConnect: `node $DATA/ask.mjs connect $PROXY`,
			byHTTP:    `node $DATA/ask.mjs http $PROXY`,
			byPort:    `node $DATA/ask.mjs port $ORDERS`,
			byUnix:    `node $DATA/ask.mjs unix $SOCKETS/orders`,
			byCommand: `node $DATA/ask.mjs command "$CONNECT"`,
		},
		not: map[string]string{bySOCKS: "has no client of SOCKS without a package of others", byPAC: noPAC},
	},
	{
		name: "Java", want: "you are " + clientID + " by HTTP/",
		plain: `java $JAVA Ask https://orders.shop.example/`,
		at: map[string]string{
			byConnect: `java $JAVA Ask https://orders.shop.example/ http $PROXY`,
			bySOCKS:   `java $JAVA Ask https://orders.shop.example/ socks5 $PROXY`,
			byHTTP:    `java $JAVA Ask http://page.shop.example/ http $PROXY`,
			byPort:    `echo 127.0.0.1 orders.shop.example >hosts; java $JAVA -Djdk.net.hosts.file=hosts Ask https://orders.shop.example:$ORDERS/`,
		},
		not: map[string]string{byPAC: noPAC, byUnix: "has Unix sockets for channels, and HttpClient takes none", byCommand: noCommand},
	},
	{
		name: "JDBC", want: "/CN=web",
		plain: `java -cp .:postgresql.jar Query "jdbc:postgresql://db.shop.example/` + jdbcFiles,
		at: map[string]string{
			bySOCKS: `java -cp .:postgresql.jar -DsocksProxyHost=127.0.0.1 -DsocksProxyPort=$PROXY Query "jdbc:postgresql://db.shop.example/` + jdbcFiles,
			byPort:  `echo 127.0.0.1 db.shop.example >hosts; java -cp .:postgresql.jar -Djdk.net.hosts.file=hosts Query "jdbc:postgresql://db.shop.example:$DB/` + jdbcFiles,
		},
		not: map[string]string{byConnect: "has no setting for a proxy of HTTP", byHTTP: noHTTP, byPAC: noPAC, byUnix: "has Unix sockets by a package of others alone", byCommand: noCommand},
	},
	{
		name: "kubectl", want: "you are " + clientID + " by HTTP/",
		plain: `$KUBECTL --server https://orders.shop.example ` + kubeFiles + ` get --raw /version`,
		at: map[string]string{
			byConnect: `HTTPS_PROXY=http://127.0.0.1:$PROXY $KUBECTL --server https://orders.shop.example ` + kubeFiles + ` get --raw /version`,
			bySOCKS: `$CULVERT kube login west --agent 127.0.0.1:$PROXY --kubeconfig config --server orders.shop.example --ca ca.pem --cert me.pem --key me.key
				$KUBECTL --kubeconfig config get --raw /version`,
			byHTTP: `HTTP_PROXY=http://127.0.0.1:$PROXY $KUBECTL --server http://page.shop.example get --raw /version`,
			byPort: `$KUBECTL --server https://127.0.0.1:$ORDERS --tls-server-name orders.shop.example ` + kubeFiles + ` get --raw /version`,
		},
		not: map[string]string{byPAC: noPAC, byUnix: "takes no Unix socket as a server", byCommand: "runs plugins for credentials, and none for connections"},
	},
}

// table is the matrix as the guide to the agent has it.
func table(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "| | %s |\n|%s\n", strings.Join(entries, " | "), strings.Repeat(" --- |", 1+len(entries)))
	for _, p := range matrix {
		b.WriteString("| " + p.name + " |")
		for _, entry := range entries {
			script := p.script(entry)
			if (script == "") == (p.not[entry] == "") {
				t.Errorf("%s, %s: there is one of a script and a reason why there is none", p.name, entry)
			}
			b.WriteString(map[bool]string{true: " yes |", false: " - |"}[script != ""])
		}
		b.WriteString("\n")
	}
	return b.String()
}

// script is what runs at an entry, or "".
func (p *program) script(entry string) string {
	switch {
	case entry == byExec, entry == byCapture:
		return p.plain
	case entry != bySystemd:
		return p.at[entry]
	case p.at[byConnect] != "":
		return p.at[byConnect]
	}
	return p.at[byPort]
}

// onePortPrograms are the programs in their network.
type onePortPrograms struct {
	*world
	files    string // a folder of which each program has a copy as its own
	env      []string
	public   string   // the key that SSH lets in
	captured []string // what runs programs that have the agent as their resolver, in place of within
}

// onePortPrograms prepares what the scripts of the matrix need.
func (w *world) onePortPrograms(t *testing.T, s *shop) *onePortPrograms {
	t.Helper()
	p := &onePortPrograms{world: w, files: filepath.Join(w.dir, "files")}
	must(t, os.MkdirAll(filepath.Join(p.files, ".pki", "nssdb"), 0o700))

	if out, errs, code := command(t, "redis-cli", append(s.redis, "--tls", "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "set", "where", "in a cache")...); code != 0 || out != "OK\n" {
		t.Fatalf("redis-cli: exit code %d, %s%s", code, out, errs)
	}
	public, err := os.ReadFile(filepath.Join(s.keys, "client.pub"))
	must(t, err)
	p.public = strings.Fields(string(public))[1]
	host, err := os.ReadFile(filepath.Join(s.keys, "host.pub"))
	must(t, err)
	for name, text := range map[string]string{
		"files/known_hosts": "build.shop.example " + string(host),
		"files/ssh_config": fmt.Sprintf("IdentityFile %s\nIdentitiesOnly yes\nBatchMode yes\nStrictHostKeyChecking yes\nGlobalKnownHostsFile none\nUserKnownHostsFile known_hosts\nKexAlgorithms curve25519-sha256\n",
			filepath.Join(s.keys, "client")),
		"no-resolver": "nameserver 192.0.2.53\n",
		"resolver":    "nameserver 127.0.0.54\n",
	} {
		w.write(t, name, text)
	}
	// A browser without a person has the certificate that its policy chooses.
	policies := filepath.Join(w.dir, "chromium")
	must(t, os.MkdirAll(filepath.Join(policies, "policies", "managed"), 0o755))
	w.write(t, "chromium/policies/managed/culvert.json", `{"AutoSelectCertificateForUrls": ["{\"pattern\": \"https://[*.]shop.example\", \"filter\": {}}"]}`)
	p12, nss := filepath.Join(p.files, "me.p12"), "sql:"+filepath.Join(p.files, ".pki", "nssdb")
	for _, args := range [][]string{
		{"openssl", "pkcs12", "-export", "-in", w.cert, "-inkey", w.key, "-name", "me", "-out", p12, "-passout", "pass:changeit"},
		{"certutil", "-d", nss, "-N", "--empty-password"},
		{"certutil", "-d", nss, "-A", "-n", "ca", "-t", "C,,", "-i", w.ca},
		{"pk12util", "-d", nss, "-i", p12, "-W", "changeit"},
		{"keytool", "-importcert", "-noprompt", "-alias", "ca", "-file", w.ca, "-keystore", filepath.Join(p.files, "trust.p12"), "-storepass", "changeit"},
		{"openssl", "pkcs8", "-topk8", "-nocrypt", "-in", w.key, "-outform", "DER", "-out", filepath.Join(p.files, "me.pk8")},
		{"javac", "-d", p.files, "testdata/oneport/Ask.java", "testdata/Query.java"},
	} {
		if out, errs, code := command(t, args[0], args[1:]...); code != 0 {
			t.Fatalf("%q: exit code %d, %s%s", args, code, out, errs)
		}
	}

	data, err := filepath.Abs("testdata/oneport")
	must(t, err)
	p.env = []string{
		"SOCKETS=" + w.dir, "DATA=" + data, "CULVERT=" + culvert, "KUBECTL=" + os.Getenv(onePortKubectl), "CONNECT=" + culvert + " connect --agent 127.0.0.1:1080",
		"REPOSITORY=" + filepath.Join(w.dir, "served", "site.git"), "QUERY=select client_dn from pg_stat_ssl where pid = pg_backend_pid()",
		"CHROMIUM=chromium --user-data-dir=chromium --disable-features=HttpsUpgrades " + strings.Join(browserFlags, " "),
		"JAVA=-cp . -Djavax.net.ssl.keyStore=me.p12 -Djavax.net.ssl.keyStorePassword=changeit -Djavax.net.ssl.trustStore=trust.p12 -Djavax.net.ssl.trustStorePassword=changeit",
	}
	// ip has a mount namespace for each command.
	mount := []string{"/bin/sh", "-e", "-c", `mount --bind "$0" /etc/resolv.conf; mount --bind "$1" /etc/chromium; shift; exec "$@"`}
	p.captured = slices.Concat(w.within, mount, []string{filepath.Join(w.dir, "resolver"), policies})
	w.within = slices.Concat(w.within, mount, []string{filepath.Join(w.dir, "no-resolver"), policies})
	return p
}

// agents starts two agents in the network of the programs, one of them by sockets of systemd,
// and returns what ends them. The configuration is that of both: keys of the file, and those of agent.
// No forward is at the port of its service: its address would be that of the name, and programs
// would come to it where they are to be captured.
func (p *onePortPrograms) agents(t *testing.T, name, top, agent string) (stop func()) {
	t.Helper()
	config := func(name, entries string) string {
		return p.write(t, name+".yaml", fmt.Sprintf(`%[1]s
services:
  - {name: page.shop.example, ports: [80], endpoints: [{address: "page.shop.example:80", network: gateways}], tls: {serverName: orders.shop.example, %[2]s}}
  - {name: page-db.shop.example, ports: [5432], startTLS: postgres, endpoints: [{address: "page-db.shop.example:5432", network: gateways}], tls: {serverName: db.shop.example, %[2]s}}
agent: {%[3]s, certificateFile: edge/laptop.crt, keyFile: edge/laptop.key, caFile: ca.crt, names: ["*.shop.example"], %[4]s}
`, top, "certificateFile: web.crt, keyFile: web.key, caFile: ca.crt", agent, entries))
	}
	first := startCmd(t, p.inside(t, "culvert", "agent", "--log-level", "debug", "--config", config(name, fmt.Sprintf(`
  proxy: "127.0.0.1:1080",
  forwards: {
    8443: "orders.shop.example:443", 15432: "db.shop.example:5432", 16379: "cache.shop.example:6379", 2222: "build.shop.example:22",
    "unix:%[1]s/orders": "orders.shop.example:443", "unix:%[1]s/.s.PGSQL.5432": "page-db.shop.example:5432",
    "unix:%[1]s/cache": "cache.shop.example:6379", "unix:%[1]s/build": "build.shop.example:22"},
  dns: {listen: ["udp://127.0.0.54:53", "tcp://127.0.0.54:53"]},
  capture: {vips: true}`, p.dir))))
	first.await(t, "listened", func() bool {
		_, _, proxy := runCmd(t, p.inside(t, "curl", "-sS", "-f", "-o", "/dev/null", "http://127.0.0.1:1080/proxy.pac"))
		rules, _, _ := runCmd(t, p.inside(t, "nft", "list", "ruleset"))
		return proxy == 0 && strings.Contains(rules, "redirect")
	})
	systemd := []string{"--fdname=agent:orders:db:cache:build"}
	for _, port := range []string{"1081", "8444", "5433", "6380", "2223"} {
		systemd = append(systemd, "--listen=127.0.0.1:"+port)
	}
	for _, v := range environ() {
		systemd = append(systemd, "--setenv="+v)
	}
	second := startCmd(t, p.inside(t, "systemd-socket-activate", append(systemd, culvert, "agent", "--log-level", "debug", "--config", config(name+"-systemd", `
  proxy: "fd:agent",
  forwards: {"fd:orders": "orders.shop.example:443", "fd:db": "db.shop.example:5432", "fd:cache": "cache.shop.example:6379", "fd:build": "build.shop.example:22"}`))...))
	second.await(t, "listened", func() bool { return strings.Count(second.output(), "Listening on") == 5 })
	return func() {
		for _, agent := range []*process{first, second} {
			agent.signal(syscall.SIGKILL)
			agent.awaitEnd(t)
		}
	}
}

// row runs a program at the entries that it can use.
func (p *onePortPrograms) row(t *testing.T, one program) {
	t.Run(one.name, func(t *testing.T) {
		t.Parallel()
		for _, entry := range entries {
			if one.not[entry] != "" {
				continue
			}
			t.Run(entry, func(t *testing.T) {
				t.Parallel()
				p.cell(t, &one, entry)
			})
		}
	})
}

// cell runs a program at an entry, with the ports of that in its environment.
func (p *onePortPrograms) cell(t *testing.T, one *program, entry string) {
	dir, in, script := t.TempDir(), *p.world, one.script(entry)
	must(t, os.CopyFS(dir, os.DirFS(p.files)))
	ports := []string{"PROXY=1080", "ORDERS=8443", "DB=15432", "CACHE=16379", "BUILD=2222"}
	switch entry {
	case bySystemd:
		ports = []string{"PROXY=1081", "ORDERS=8444", "DB=5433", "CACHE=6380", "BUILD=2223"}
	case byCapture:
		in.within = p.captured
	case byExec:
		in.within = append(slices.Clone(in.within), culvert, "exec", "--")
	}
	out := in.script(t, dir, append(ports, p.env...), script)
	if want := strings.ReplaceAll(one.want, "$PUBLIC", p.public); !strings.Contains(out, want) {
		t.Errorf("got %q, want %q in it, of\n%s", out, want, script)
	}
}
