BEGIN TRANSACTION;
CREATE TABLE batches (
	consumer TEXT NOT NULL,
	seq BIGINT NOT NULL,
	incarnation BIGINT,
	trains_from BIGINT,
	num_groups BIGINT,
	num_rows BIGINT,
	digest TEXT,
	manifest BLOB,
	reward_mean FLOAT,
	staleness_mean FLOAT,
	staleness_max BIGINT,
	sealed_at FLOAT,
	PRIMARY KEY (consumer, seq)
);
INSERT INTO "batches" VALUES('policy',1,1,0,1,2,'254119f666a0bd1d320bc0cab7920d6cea4c768b9bf6ed019e4a674a242a4bae',X'84A8636F6E73756D6572A6706F6C696379A373657101AB747261696E735F66726F6D00A667726F7570739183A867726F75705F6964A470302D31A87461736B5F6B6579D9206137373436643532616464626637366338353466353034373730346331626463A4726F77739286A6726F775F6964A870302D312E302E31A6646967657374D94030633735643530656232356139343334373537333731376166663465383536363164396666323330633864376166646231343539316432616563393439666133A6726577617264CB0000000000000000A76F7574636F6D65A9636F6D706C65746564A773616D706C656481A6706F6C69637902A876657273696F6E7381A6706F6C6963799192010086A6726F775F6964A870302D312E312E31A6646967657374D94036306162343431623737306538366130383435316366363533383762353863663634373230643437613036386437663462383636383363613061373537333434A6726577617264CB3FD0000000000000A76F7574636F6D65A9636F6D706C65746564A773616D706C656481A6706F6C69637902A876657273696F6E7381A6706F6C69637991920100',0.125,0.0,0,1.79471555699999952312e+09);
CREATE TABLE checkpoints (
	policy TEXT NOT NULL,
	incarnation BIGINT,
	retained TEXT,
	at FLOAT,
	PRIMARY KEY (policy)
);
INSERT INTO "checkpoints" VALUES('policy',1,'[[1,1]]',1.79471555699999976152e+09);
CREATE TABLE commits (
	consumer TEXT NOT NULL,
	seq BIGINT NOT NULL,
	incarnation BIGINT NOT NULL,
	number BIGINT,
	skipped TEXT,
	stats TEXT,
	at FLOAT,
	PRIMARY KEY (consumer, seq, incarnation)
);
INSERT INTO "commits" VALUES('policy',1,1,1,'','{}',1.79471555699999976152e+09);
CREATE TABLE fates (
	consumer TEXT NOT NULL,
	group_id TEXT NOT NULL,
	state TEXT,
	reason TEXT,
	rule TEXT,
	seq BIGINT,
	tokens BIGINT,
	at FLOAT,
	PRIMARY KEY (consumer, group_id)
);
INSERT INTO "fates" VALUES('policy','p0-1','sealed','','edf',1,4,1.79471555699999952312e+09);
INSERT INTO "fates" VALUES('policy','p0-2','admitted','','all',0,4,1.79471555699999976152e+09);
CREATE TABLE groups (
	group_id TEXT NOT NULL,
	partition BIGINT,
	issue BIGINT,
	source TEXT,
	ordinal BIGINT,
	task_key TEXT,
	task TEXT,
	num_slots BIGINT,
	due TEXT,
	state TEXT,
	reason TEXT,
	issued_at FLOAT,
	ended_at FLOAT,
	PRIMARY KEY (group_id)
);
INSERT INTO "groups" VALUES('p0-1',0,1,'train',0,'a7746d52addbf76c854f5047704c1bdc','{"key":"a7746d52addbf76c854f5047704c1bdc","source":"train","ordinal":0,"payload":{"prompt":"dgi>","answer":"igd"},"workflow":"single_turn","seed":3444227128425568850,"tags":[]}',2,'{"policy":0}','closed','',1.79471555699999976152e+09,1.79471555699999976152e+09);
INSERT INTO "groups" VALUES('p0-2',0,2,'train',1,'3f2188110156ec4ce01233102f527745','{"key":"3f2188110156ec4ce01233102f527745","source":"train","ordinal":1,"payload":{"prompt":"heg>","answer":"geh"},"workflow":"single_turn","seed":6729380794463937,"tags":[]}',2,'{"policy":1}','closed','',1.79471555699999976152e+09,1.79471555699999976152e+09);
INSERT INTO "groups" VALUES('p0-3',0,3,'train',2,'96fa068582ea954a0170c75686f99cd1','{"key":"96fa068582ea954a0170c75686f99cd1","source":"train","ordinal":2,"payload":{"prompt":"hdj>","answer":"jdh"},"workflow":"single_turn","seed":6287530211433182527,"tags":[]}',2,'{"policy":2}','open','',1.79471555699999976152e+09,0.0);
CREATE TABLE incarnations (
	policy TEXT NOT NULL,
	incarnation BIGINT NOT NULL,
	number BIGINT,
	seq BIGINT,
	request_id TEXT,
	at FLOAT,
	PRIMARY KEY (policy, incarnation)
);
INSERT INTO "incarnations" VALUES('policy',1,0,0,'r',1.79471555699999976152e+09);
CREATE TABLE leases (
	group_id TEXT NOT NULL,
	slot BIGINT NOT NULL,
	epoch BIGINT NOT NULL,
	attempt BIGINT,
	node_id TEXT,
	session TEXT,
	request_id TEXT,
	granted_at FLOAT,
	ended TEXT,
	ended_at FLOAT,
	PRIMARY KEY (group_id, slot, epoch)
);
INSERT INTO "leases" VALUES('p0-1',0,1,1,'n0','s','a',1.79471555699999976152e+09,'delivered',1.79471555699999976152e+09);
INSERT INTO "leases" VALUES('p0-1',1,1,1,'n0','s','a',1.79471555699999976152e+09,'delivered',1.79471555699999976152e+09);
INSERT INTO "leases" VALUES('p0-2',0,1,1,'n0','s','a',1.79471555699999976152e+09,'delivered',1.79471555699999976152e+09);
INSERT INTO "leases" VALUES('p0-2',1,1,1,'n0','s','a',1.79471555699999976152e+09,'delivered',1.79471555699999976152e+09);
CREATE TABLE meta (
	"key" TEXT NOT NULL,
	value TEXT,
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('format','1');
INSERT INTO "meta" VALUES('service_epoch','1');
CREATE TABLE nodes (
	node_id TEXT NOT NULL,
	session TEXT,
	capacity BIGINT,
	policies TEXT,
	tags TEXT,
	"left" BOOLEAN,
	at FLOAT,
	PRIMARY KEY (node_id)
);
INSERT INTO "nodes" VALUES('n0','s',64,'[]','[]',0,1.79471555699999952312e+09);
CREATE TABLE rows (
	row_id TEXT NOT NULL,
	group_id TEXT,
	slot BIGINT,
	epoch BIGINT,
	node_id TEXT,
	digest TEXT,
	segment BIGINT,
	"offset" BIGINT,
	length BIGINT,
	outcome TEXT,
	reward FLOAT,
	sampled TEXT,
	versions TEXT,
	delivered_at FLOAT,
	PRIMARY KEY (row_id)
);
INSERT INTO "rows" VALUES('p0-1.0.1','p0-1',0,1,'n0','0c75d50eb25a94347573717aff4e85661d9ff230c8d7afdb14591d2aec949fa3',1,0,433,'completed',0.0,'{"policy":2}','{"policy":[[1,0]]}',1.79471555699999976152e+09);
INSERT INTO "rows" VALUES('p0-1.1.1','p0-1',1,1,'n0','60ab441b770e86a08451cf65387b58cf64720d47a068d7f4b86683ca0a757344',1,445,433,'completed',0.25,'{"policy":2}','{"policy":[[1,0]]}',1.79471555699999976152e+09);
INSERT INTO "rows" VALUES('p0-2.0.1','p0-2',0,1,'n0','35f3e7f8a8b91925eb6667137daf231d8bfe9a52e8e34dbdecf1de2cf4a668da',1,890,433,'completed',0.0,'{"policy":2}','{"policy":[[1,0]]}',1.79471555699999976152e+09);
INSERT INTO "rows" VALUES('p0-2.1.1','p0-2',1,1,'n0','5bf483befa3076e7de413f8c93d92c6cd8e02932aa6892ec1a7da3d76644676c',1,1335,433,'completed',0.25,'{"policy":2}','{"policy":[[1,0]]}',1.79471555699999976152e+09);
CREATE TABLE sources (
	name TEXT NOT NULL,
	next_ordinal BIGINT,
	PRIMARY KEY (name)
);
INSERT INTO "sources" VALUES('train',3);
CREATE TABLE versions (
	policy TEXT NOT NULL,
	incarnation BIGINT NOT NULL,
	number BIGINT NOT NULL,
	manifest_digest TEXT,
	weights_digest TEXT,
	at FLOAT,
	PRIMARY KEY (policy, incarnation, number)
);
INSERT INTO "versions" VALUES('policy',1,0,'m','w',1.79471555699999976152e+09);
CREATE INDEX rows_by_group ON rows (group_id);
COMMIT;
